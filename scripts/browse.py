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

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtGui import QImage
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

# The sandbox of Chromium refuses to start for root, as in most containers; the pages are our own.
_FLAGS = "--no-sandbox --disable-gpu --log-level=3"
_LIMIT_S = 60  # for the page to load, the script to run and the picture to be taken
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
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info: Any) -> None:  # noqa: N802  Qt's own name
        self.urls.append(info.requestUrl().toString())


class _Page(QWebEnginePage):
    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.console: list[str] = []

    def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:  # noqa: N802
        self.console.append(f"{source}:{line}: {message}")


class _Visit:
    """One page, from its loading to its picture."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.requests = _Requests()
        self.profile = QWebEngineProfile()  # without a name: nothing is kept
        self.profile.setUrlRequestInterceptor(self.requests)
        self.page = _Page(self.profile)
        self.view = QWebEngineView()
        self.view.setPage(self.page)
        self.view.resize(args.width, args.height)
        self.page.loadFinished.connect(self._loaded)
        self.page.load(QUrl.fromUserInput(args.page, os.getcwd()))
        self.view.show()

    def _loaded(self, is_whole: bool) -> None:
        if not is_whole:
            print(f"{self.args.page} cannot be loaded.", file=sys.stderr)
            QApplication.exit(2)
            return
        script = f"JSON.stringify([({self.args.evaluate}), document.documentElement.scrollHeight])"
        self.page.runJavaScript(script, self._evaluated)

    def _evaluated(self, answer: str | None) -> None:
        if not answer:  # the exception of the script is a message of the console
            print("\n".join(self.page.console), file=sys.stderr)
            QApplication.exit(2)
            return
        value, height = json.loads(answer)
        print(json.dumps({"value": value, "console": self.page.console, "requests": self.requests.urls}))
        if not self.args.png:
            QApplication.exit(0)
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
        if picture == last:
            QApplication.exit(0 if picture.save(self.args.png) else 2)
        else:
            QTimer.singleShot(_SETTLE_MS, lambda: self._shoot(picture))


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
    QTimer.singleShot(1000 * _LIMIT_S, lambda: app.exit(124))
    code = app.exec()
    del visit.view, visit.page, visit.profile  # in the order in which Chromium lets go of them
    return code


if __name__ == "__main__":
    sys.exit(main())
