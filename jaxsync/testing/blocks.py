"""Blocks of the kit, whose failures show the line of the test and none of the kit's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

from jaxsync.errors import FaultMissedError, LeakError, RecompiledError

T = TypeVar("T")
P = ParamSpec("P")


class Block(ContextDecorator, Generic[T]):
    """A context manager around another, out of whose assertions the way inside is cut.

    `__tracebackhide__` in a generator would still show the lines of `contextlib` that run it.

    >>> import contextlib
    >>> with Block(lambda: contextlib.nullcontext(3)) as number:
    ...     number
    3
    """

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[T]] = []

    def __enter__(self) -> T:
        """What the inner one gives."""
        __tracebackhide__ = True
        inner = self._make()
        value = inner.__enter__()
        self._entered.append(inner)
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Ends the inner one.

        Raises:
            LeakError, RecompiledError, FaultMissedError: What the inner one found.
        """
        __tracebackhide__ = True
        try:
            self._entered.pop().__exit__(kind, error, where)
        except (LeakError, RecompiledError, FaultMissedError) as found:
            # What the block's own body raised is not raised again here: its traceback stays whole.
            raise found.with_traceback(None)  # noqa: B904


def quiet(make: Callable[P, AbstractContextManager[T]]) -> Callable[P, Block[T]]:
    """A function that makes a `Block` of what `make` makes.

    >>> import contextlib
    >>> with quiet(contextlib.nullcontext)(3) as number:
    ...     number
    3
    """

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(lambda: make(*args, **kwargs))

    return made
