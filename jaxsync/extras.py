"""Optional dependencies: imported when they are needed, or named with the command that installs them."""

from __future__ import annotations

import importlib
from typing import Any

from jaxsync.errors import MissingExtraError


def import_extra(module: str, *, package: str, feature: str, extra: str = "train") -> Any:
    """The module of an optional dependency.

    Args:
        module: What to import, such as `"sklearn.datasets"`.
        package: What to install for it, such as `"scikit-learn"`.
        feature: What needs it, for the message.
        extra: The extra of jaxsync that has it.

    Raises:
        MissingExtraError: It cannot be imported.

    >>> import_extra("optax", package="optax", feature="training").__name__
    'optax'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(feature=feature, package=package, extra=extra) from error
