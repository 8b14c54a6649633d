"""What public functions ask of their arguments, where several of them ask the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxsync.errors import ArgumentError


def check_flags(function: str, **flags: Any) -> None:
    """Refuses what is neither True nor False: "no" would count as yes.

    Args:
        function: What was called, for the error.
        **flags: Its arguments, by name.

    Raises:
        ArgumentError: Names the first that is no bool.

    >>> check_flags("make_train_step", donate="no")
    Traceback (most recent call last):
    ...
    jaxsync.errors.ArgumentError: make_train_step got donate = 'no'; wanted True or False.
    To fix it: see help(jaxsync.make_train_step) for what each argument is, and their order.
    """
    for argument, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            got = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
            raise ArgumentError(function=function, argument=argument, got=got, wanted="True or False")
