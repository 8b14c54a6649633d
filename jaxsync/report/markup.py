"""Markup: elements of HTML and SVG, in which all text is escaped unless it is markup already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

# What XML 1.0 allows in no form (section 2.2): a leaf path is the user's own and may hold anything.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_EMPTY = frozenset({"meta", "br", "rect", "line", "path", "circle", "polyline"})

# Only what inherits from its surroundings or is read on white and on black: a notebook's theme is its own,
# and prefers-color-scheme does not tell it.
_FRAGMENT_STYLE = """
.jaxsync{--jx-line:rgba(127,127,127,.4);--jx-soft:rgba(127,127,127,.12);--jx-bad:#d55e00;
font:14px/1.5 system-ui,sans-serif;color:inherit;max-width:60rem}
.jaxsync h2{font-size:1.15em;margin:1.6em 0 .4em}
.jaxsync p{margin:.4em 0}
.jaxsync p,.jaxsync li{overflow-wrap:anywhere}
.jaxsync table{border-collapse:collapse;margin:.4em 0;color:inherit}
.jaxsync th,.jaxsync td{padding:.15em .8em .15em 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--jx-line);background:none}
.jaxsync th{white-space:nowrap}
.jaxsync td.number,.jaxsync th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.jaxsync pre{background:var(--jx-soft);color:inherit;padding:.6em;overflow-x:auto;font-size:12px}
.jaxsync svg{display:block;max-width:100%;height:auto}
.jaxsync .scroll{overflow-x:auto}
.jaxsync .bad{border-left:4px solid var(--jx-bad);padding-left:.6em}
"""
_PAGE_STYLE = """
:root{color-scheme:light dark;--jx-ink:#1f2328;--jx-paper:#fff}
@media (prefers-color-scheme:dark){:root{--jx-ink:#e6edf3;--jx-paper:#0d1117}}
body{margin:2rem auto;max-width:60rem;padding:0 1rem;color:var(--jx-ink);background:var(--jx-paper);
font:14px/1.5 system-ui,sans-serif}
h1{font-size:1.5em;overflow-wrap:anywhere}
"""


class Markup(str):
    """Text that is markup, and not escaped again."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Text as markup that shows it, in elements and in quoted attributes.

    >>> escape("<b title='x'>")
    '&lt;b title=&#x27;x&#x27;&gt;'
    """
    return text if isinstance(text, Markup) else Markup(html.escape(_FORBIDDEN.sub("\ufffd", text)))


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """One element.

    Args:
        name: Its tag.
        *children: Text, which is escaped, and markup, which is not.
        **attributes: `_` stands for `-`, a `_` at the end for nothing; None leaves the attribute out.

    >>> element("td", "a < b", class_="number", title=None)
    '<td class="number">a &lt; b</td>'
    """
    pairs = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    opening = f"<{name}{''.join(pairs)}"
    if name in _EMPTY:
        return Markup(f"{opening}/>")
    return Markup(f"{opening}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """Parts one after the other; those that are text are escaped."""
    return Markup("".join(escape(part) for part in parts))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table; columns in which every cell begins with a digit are set to the right."""
    columns = list(zip(*rows, strict=True)) or [()] * len(header)
    kinds = [
        "number" if column and all(cell[:1].isdigit() or cell == "-" for cell in column) else None
        for column in columns
    ]
    head = [element("th", cell, class_=kind) for cell, kind in zip(header, kinds, strict=True)]
    body = [
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    parts = element("thead", element("tr", *head)), element("tbody", *body)
    return element("div", element("table", *parts), class_="scroll")


def fragment(*parts: str) -> str:
    """Parts as one block with its own style, for a notebook."""
    style = element("style", Markup(_FRAGMENT_STYLE))
    return str(element("div", style, *parts, class_="jaxsync"))


def page(title: str, *parts: str) -> str:
    """A whole HTML page that loads nothing."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(_PAGE_STYLE)),
    )
    body = element("body", element("h1", title), Markup(fragment(*parts)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"
