from __future__ import annotations

from html.parser import HTMLParser

import pytest

from jaxsync.report.markup import Markup, element, escape, fragment, join, page, table

EVIL = '</td><script>alert("it\'s")</script>&amp;\x00\ud800'


class Tags(HTMLParser):
    """Which elements there are, and whether each that opens is closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


def test_text_stays_text() -> None:
    tags = read(element("p", EVIL, title=EVIL))
    assert tags.seen == ["p"]
    assert "".join(tags.text) == '</td><script>alert("it\'s")</script>&amp;\ufffd\ufffd'


def test_markup_is_not_escaped_twice() -> None:
    assert element("p", element("b", "a & b"), " < ") == "<p><b>a &amp; b</b> &lt; </p>"
    assert escape(Markup("<b>")) == "<b>"
    assert join(["<", Markup("<br/>")]) == "&lt;<br/>"


def test_attributes_without_a_value_are_left_out() -> None:
    assert element("rect", fill_opacity=0.5, x="1", class_=None) == '<rect fill-opacity="0.5" x="1"/>'


def test_columns_of_numbers_are_set_to_the_right() -> None:
    html = table(["leaf", "bytes"], [["w", "16"], ["2b", "-"]])
    assert html.count('<td class="number">') == 2
    assert '<th class="number">bytes</th>' in html
    assert read(table(["leaf"], [])).seen.count("th") == 1


@pytest.mark.parametrize(
    "make", [lambda body: fragment(body), lambda body: page(EVIL, body)], ids=["part", "page"]
)
def test_a_page_is_whole_and_loads_nothing(make) -> None:
    html = make(element("p", EVIL))
    tags = read(html)
    assert "script" not in tags.seen
    assert not {"img", "link", "iframe"} & set(tags.seen)
    assert "url(" not in html
    assert "@import" not in html
    assert "http" not in html


def test_a_page_has_a_form_for_the_dark() -> None:
    assert "@media (prefers-color-scheme:dark)" in page("a title")
    assert "<title>a title</title>" in page("a title")
