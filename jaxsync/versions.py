"""What is installed: versions of the libraries that a run depends on."""

from __future__ import annotations

import importlib.metadata
import platform
import re

__version__ = "0.1.0"

_LIBRARIES = ("jax", "jaxlib", "numpy")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+).*;.*\bextra == ['\"]([A-Za-z0-9._-]+)['\"]")


def library_versions() -> dict[str, str]:
    """Versions of Python, jaxsync, jax, jaxlib and numpy, for records.

    >>> sorted(library_versions())
    ['jax', 'jaxlib', 'jaxsync', 'numpy', 'python']
    """
    found = {name: installed_version(name) for name in _LIBRARIES}
    return {
        "python": platform.python_version(),
        "jaxsync": __version__,
        **{name: version or "not installed" for name, version in found.items()},
    }


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not there. Imports nothing.

    >>> installed_version("no-such-package") is None
    True
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def extra_packages() -> dict[str, dict[str, str | None]]:
    """For each extra of jaxsync its packages, each with the version that is installed, if it is.

    Empty if jaxsync was not installed, but only found on the path: nothing then says what belongs where.
    """
    try:
        requirements = importlib.metadata.requires("jaxsync") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    extras: dict[str, dict[str, str | None]] = {}
    for requirement in requirements:
        if (match := _REQUIREMENT.match(requirement)) and match[1] != "jaxsync":
            extras.setdefault(match[2], {})[match[1]] = installed_version(match[1])
    return extras
