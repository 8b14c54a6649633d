"""The base of all errors, which joins what, where and how to fix it, and the decorator that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform

from jaxsync.report.markup import Markup, element, fragment

E = TypeVar("E", bound="JaxsyncError")
T = TypeVar("T")

_MAX_PLACES = 8  # enough to see the pattern; a tree of 10,000 leaves must not flood a terminal


def _present(thing: T) -> T:
    # Tracebacks and pickles name where a thing is imported from; in which file it stands may change.
    thing.__module__ = "jaxsync.errors"
    return thing


@_present
def _rebuild(cls: type[JaxsyncError], facts: dict[str, Any]) -> JaxsyncError:
    return cls(**facts)


@_present
class JaxsyncError(Exception):
    """Base of all errors of jaxsync: what happened, where, what to do."""

    def what(self) -> str:
        """One sentence: what happened."""
        raise NotImplementedError

    def places(self) -> Sequence[str]:
        """One line for each place (leaf path, device, axis) that is at fault."""
        return ()

    def fix(self) -> str:
        """What the reader should do."""
        raise NotImplementedError

    def picture(self) -> str:
        """An SVG picture of what happened, or nothing."""
        return ""

    def __str__(self) -> str:
        places = list(self.places())
        lines = [self.what()]
        lines += [f"  - {place}" for place in places[:_MAX_PLACES]]
        if len(places) > _MAX_PLACES:
            lines.append(f"  - and {len(places) - _MAX_PLACES} more")
        lines.append(f"To fix it: {self.fix()}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.what()}>"

    def _repr_html_(self) -> str:
        places = [element("li", place) for place in self.places()[:_MAX_PLACES]]
        if (rest := len(self.places()) - _MAX_PLACES) > 0:
            places.append(element("li", f"and {rest} more"))
        what, _, table = self.fix().partition("\nThe last events:\n")
        parts = [
            element("p", f"{type(self).__name__}: {self.what()}"),
            *([element("ul", *places)] if places else []),
            element("p", f"To fix it: {what}"),
            *([element("p", "The last events:"), element("pre", table)] if table else []),
            Markup(self.picture()),
        ]
        return fragment(element("div", *parts, class_="bad"))

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception pickles as cls(*args); ours are made from keywords only.
        facts = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        notes = getattr(self, "__notes__", None)
        return _rebuild, (type(self), facts), {"__notes__": list(notes)} if notes else None


@dataclass_transform(kw_only_default=True, eq_default=False)
def error(cls: type[E]) -> type[E]:
    """The class as a dataclass of keyword-only facts, under the name it is imported by."""
    # Not frozen: Python itself sets __traceback__ and __cause__ on exceptions.
    # Presented last: the dataclass looks up its annotations where the class was written.
    return _present(dataclass(eq=False, kw_only=True, repr=False)(cls))


def quote_names(names: Sequence[str]) -> str:
    """Names one after another, each in quotes.

    >>> print(quote_names(("data", "model")))
    'data', 'model'
    """
    return ", ".join(repr(name) for name in names)
