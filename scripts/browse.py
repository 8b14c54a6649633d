"""Opens a page in headless Chromium (Qt WebEngine), and tells or shows what a reader would see.

    python scripts/browse.py PAGE.html --png page.png [--dark] [--width 400]
    python scripts/browse.py PAGE.html --evaluate 'document.title'

Prints one JSON object: `value` of the script, `console` (every message of the page) and `requests` (every URL
that the page asked for, the page itself among them). Needs no display; PyQt6-WebEngine brings the browser.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

try:
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtGui import QImage
    from PyQt6.QtWebEngineCore import (
        QWebEnginePage,
        QWebEngineProfile,
        QWebEngineSettings,
        QWebEngineUrlRequestInterceptor,
    )
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication
except ModuleNotFoundError as error:
    sys.exit(f"{error}. To have it: scripts/venv dev, or pip install PyQt6-WebEngine")

# The sandbox of Chromium refuses to start for root, as in most containers; the pages are our own.
_FLAGS = "--no-sandbox --disable-gpu --log-level=3"
_LIMIT_S = 45  # for the page to load, the script to run and the picture to be taken
_POLL_MS = 100
_SETTLE_MS = 400  # between two pictures, which must be equal: the window shows frames later than the page
# The height that the page was last drawn with, or 0: two frames later what was asked for first is drawn.
_DRAWN_HEIGHT = """
(() => {
  requestAnimationFrame(() => requestAnimationFrame(() => { window.drawnHeight = innerHeight; }));
  return window.drawnHeight || 0;
})()
"""


class _Requests(QWebEngineUrlRequestInterceptor):
    """Lists what a page asks for, and lets it have what comes from where the page itself does."""

    def __init__(self, page: QUrl) -> None:
        super().__init__()
        self._page = page
        self.urls: list[str] = []

    def interceptRequest(self, info: Any) -> None:  # noqa: N802  Qt's own name
        url = info.requestUrl()
        self.urls.append(url.toString())
        if not self._may_load(url):
            info.block(True)

    def _may_load(self, url: QUrl) -> bool:
        return url.isLocalFile() or (url.host(), url.port()) == (self._page.host(), self._page.port())


class _Page(QWebEnginePage):
    """Keeps what a page says."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        # Else Chromium refuses what a file asks of the network before anybody can list it.
        remote = QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls
        self.settings().setAttribute(remote, True)
        self.console: list[str] = []

    def javaScriptAlert(self, origin: QUrl, message: str) -> None:  # noqa: N802  else it waits for a click
        self.console.append(f"alert: {message}")

    def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:  # noqa: N802
        self.console.append(f"{source}:{line}: {message}")


class _Visit:
    """One page, from its loading to its picture."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.value: Any = None
        url = QUrl.fromUserInput(args.page, os.getcwd())
        self.requests = _Requests(url)
        self.profile = QWebEngineProfile()  # without a name: nothing is kept
        self.profile.setUrlRequestInterceptor(self.requests)
        self.page = _Page(self.profile)
        self.view = QWebEngineView()
        self.view.setPage(self.page)
        self.view.resize(args.width, args.height)
        self.page.loadFinished.connect(self._loaded)
        self.page.load(url)
        self.view.show()
        late = f"{args.page} was not done after {_LIMIT_S} s: it may run a script without an end."
        QTimer.singleShot(1000 * _LIMIT_S, lambda: self._give_up(late, 124))

    def _loaded(self, is_whole: bool) -> None:
        if not is_whole:
            self._give_up(f"{self.args.page} cannot be loaded.")
            return
        script = f"JSON.stringify([({self.args.evaluate}), document.documentElement.scrollHeight])"
        self.page.runJavaScript(script, self._evaluated)

    def _evaluated(self, answer: str | None) -> None:
        if not answer:  # the exception of the script is a message of the console
            self._give_up("\n".join(self.page.console))
            return
        self.value, height = json.loads(answer)
        if not self.args.png:
            self._tell()
            return
        self.view.resize(self.args.width, height)
        self._wait_until_drawn()

    def _wait_until_drawn(self) -> None:
        self.page.runJavaScript(_DRAWN_HEIGHT, self._drawn)

    def _drawn(self, height: float) -> None:
        is_drawn = height == self.view.height()
        QTimer.singleShot(*((_SETTLE_MS, self._shoot) if is_drawn else (_POLL_MS, self._wait_until_drawn)))

    def _shoot(self, last: QImage | None = None) -> None:
        picture = self.view.grab().toImage()
        if picture != last:
            QTimer.singleShot(_SETTLE_MS, lambda: self._shoot(picture))
        elif picture.save(self.args.png):
            self._tell()
        else:
            self._give_up(f"{self.args.png} cannot be written: wanted a .png in a folder that is there.")

    def _tell(self) -> None:
        told = {"value": self.value, "console": self.page.console, "requests": self.requests.urls}
        print(json.dumps(told))
        QApplication.exit(0)

    def _give_up(self, reason: str, code: int = 2) -> None:
        print(reason, file=sys.stderr)
        QApplication.exit(code)


def main() -> int:
    """Visits the page that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", metavar="PAGE", help="a file or a URL")
    parser.add_argument("--png", metavar="FILE", help="write a picture of the whole page")
    parser.add_argument("--evaluate", metavar="SCRIPT", default="null", help="an expression of JavaScript")
    parser.add_argument("--dark", action="store_true", help="as for readers who prefer dark pages")
    parser.add_argument("--width", type=int, default=1000, help="of the window, in pixels (1000)")
    parser.add_argument("--height", type=int, default=800, help="of the window, in pixels (800)")
    args = parser.parse_args()
    os.environ |= {
        "QT_QPA_PLATFORM": "offscreen",
        "QT_LOGGING_RULES": "*=false",
        "QTWEBENGINE_CHROMIUM_FLAGS": f"{_FLAGS} --blink-settings=preferredColorScheme={int(not args.dark)}",
    }
    app = QApplication(sys.argv[:1])
    visit = _Visit(args)
    code = app.exec()
    del visit.view, visit.page, visit.profile  # in the order in which Chromium lets go of them
    return code


if __name__ == "__main__":
    sys.exit(main())
