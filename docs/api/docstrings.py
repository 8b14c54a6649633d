"""Docstrings as the site shows them: doctests as code, `Collectives:` and `Threading:` as bold words."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a prompt to the next empty line. Markdown would take it for a quotation.
_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^(Collectives|Threading|Source): ", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Marks what Markdown would not understand."""
        if obj.docstring is not None:
            text = _SECTION.sub(r"**\1:** ", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
