"""Text forms of plans and audits: plain tables, byte counts people can read."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Sequence
from typing import Any


def format_bytes(num_bytes: int) -> str:
    """A byte count with a binary unit.

    >>> format_bytes(80_000), format_bytes(512), format_bytes(3 << 30)
    ('78.1 KiB', '512 B', '3.0 GiB')
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_count(number: int, singular: str, plural: str = "") -> str:
    """A number and what is counted.

    >>> format_count(1, "leaf", "leaves"), format_count(2, "leaf", "leaves"), format_count(0, "step")
    ('1 leaf', '2 leaves', '0 steps')
    """
    return f"{number} {singular if number == 1 else plural or f'{singular}s'}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; a column of numbers is set to the right.

    >>> print(format_table(["leaf", "bytes"], [["w", "16"], ["bias", "4"]]))
    leaf  bytes
    ----  -----
    w        16
    bias      4
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [bool(rows) and all(cell[:1].isdigit() for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def format_source(fn: Any) -> str:
    """Where a function is written, as `example.py:8`; nothing, if it is not a Python function.

    What wraps another one and says so (`jax.jit`, `functools.wraps`, `functools.partial`) is looked through.

    >>> format_source(len), format_source(format_count).split(":")[0]
    ('', 'text.py')
    """
    code = getattr(_unwrap(fn), "__code__", None)
    if not isinstance(code, types.CodeType):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def format_function(fn: Any, default: str) -> str:
    """The name of a function and where it is written; `default`, if that is not known.

    >>> format_function(len, "loss_fn"), format_function(format_count, "loss_fn").split(":")[0]
    ('loss_fn', 'format_count (text.py')
    """
    source = format_source(fn)
    return f"{_unwrap(fn).__name__} ({source})" if source else default


def _unwrap(fn: Any) -> Any:
    for _ in range(100):  # a wrapper may say that it wraps itself
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)
        if inner is None:
            return fn
        fn = inner
    return fn
