"""SVG pictures: what all of them share."""

from __future__ import annotations

from jaxsync.report.markup import Markup, element

# Okabe and Ito (2008, "Color Universal Design"): told apart with any colour vision. Of their colours those
# on which black text is read, and which stand out from white and from black.
BLUE, ORANGE, GREEN, PINK, RED = "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00"
OCHRE = "#b5a700"  # their yellow, darkened until it stands out from white
INK = "#000"  # of text on these colours
_CHAR_WIDTH = 6.6  # of a character at 12 px, on average: what fits is guessed, since nothing is laid out here

# Inside a page a picture takes its colour from the page. As a file of its own it is the root, and has none.
_STYLE = (
    "svg:root{color:#1f2328;background:#fff}"
    "@media (prefers-color-scheme:dark){svg:root{color:#e6edf3;background:#0d1117}}"
)


def picture(title: str, width: float, height: float, *parts: str) -> str:
    """An SVG picture, to be used inline or as a file; `title` is read to those who do not see it."""
    return str(
        element(
            "svg",
            element("title", title),
            element("style", Markup(_STYLE)),
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {number(width)} {number(height)}",
            width=number(width),
            height=number(height),
            role="img",
            font_family="system-ui, sans-serif",
            font_size="12",
            fill="currentColor",
        )
    )


def number(value: float) -> str:
    """A coordinate: two decimals are finer than any screen.

    >>> number(12.0), number(0.126)
    ('12', '0.13')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(
    x: float, y: float, width: float, height: float, fill: str, *children: str, opacity: float | None = None
) -> Markup:
    """A box; children such as a title make it a group."""
    box = element(
        "rect",
        x=number(x),
        y=number(y),
        width=number(max(width, 0.0)),
        height=number(max(height, 0.0)),
        fill=fill,
        fill_opacity=opacity,
    )
    return element("g", *children, box) if children else box


def text(x: float, y: float, content: str, *, anchor: str | None = None, fill: str | None = None) -> Markup:
    """A line of text; `y` is its base line."""
    return element("text", content, x=number(x), y=number(y), text_anchor=anchor, fill=fill)


def line(x1: float, y1: float, x2: float, y2: float, *, opacity: float = 0.2) -> Markup:
    """A thin line in the colour of text."""
    points = {"x1": number(x1), "y1": number(y1), "x2": number(x2), "y2": number(y2)}
    return element("line", stroke="currentColor", stroke_opacity=opacity, **points)


def text_width(content: str) -> float:
    """About how many pixels a line of text takes."""
    return _CHAR_WIDTH * len(content)


def shorten(content: str, width: float) -> str:
    """What of a text fits into `width` pixels; nothing if that is too little to tell.

    >>> shorten("layers[0].weight", 60), shorten("layers", 100), shorten("layers", 8)
    ('layers[0…', 'layers', '')
    """
    room = int(width / _CHAR_WIDTH)
    if len(content) <= room:
        return content
    return f"{content[: room - 1]}…" if room >= 3 else ""


def legend(x: float, y: float, entries: dict[str, str]) -> Markup:
    """What each colour means, in one line: label -> colour."""
    parts = []
    for label, colour in entries.items():
        parts += [rect(x, y - 10, 12, 12, colour), text(x + 17, y, label)]
        x += 17 + _CHAR_WIDTH * len(label) + 20
    return element("g", *parts)
