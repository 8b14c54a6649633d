"""A function of the user's own, named on the command line as `package.module:function`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxsync.errors import SubjectError


@contextlib.contextmanager
def importing_from(*folders: str | Path) -> Iterator[None]:
    """Python looks for modules in these folders first."""
    added = [str(Path(folder).absolute()) for folder in folders]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def call_reference(reference: str) -> tuple[Any, tuple[Any, ...]]:
    """What the named function returns: a step, and the arguments to compile it for.

    The module is imported. What it raises, and what the function raises, comes through as it is.

    Args:
        reference: `"package.module:function"`. The function takes no arguments and returns `(fn, *args)`.

    Raises:
        SubjectError: There is no such function, or it needs arguments, or returns something else.
    """
    made = find_function(reference)()
    if isinstance(made, tuple) and made and callable(made[0]):
        return made[0], made[1:]
    if isinstance(made, tuple) and made:
        got = f"a tuple that begins with a {type(made[0]).__name__}"
    else:
        got = f"a {type(made).__name__}"
    raise SubjectError(reference=reference, problem=f"it returned {got}; wanted (fn, *args), fn callable")


def find_function(reference: str) -> Callable[[], Any]:
    """The function that is named, which takes no arguments. The module is imported.

    Raises:
        SubjectError: There is no such function, or it needs arguments.
    """
    module_name, _, name = reference.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        hint = _leave_out_py(module_name, name)
        raise SubjectError(reference=reference, problem=f'wanted "package.module:function"{hint}')
    module = _import_module(module_name, name, reference)
    function = getattr(module, name, None)
    if function is None:
        where = getattr(module, "__file__", None) or module_name
        problem = f"{where} has no {name!r}{_nearest(name, module)}"
        raise SubjectError(reference=reference, problem=problem)
    if not callable(function):
        problem = f"{name!r} is of type {type(function).__name__}; wanted a function"
        raise SubjectError(reference=reference, problem=problem)
    if needed := _needed_arguments(function):
        problem = f"{name!r} needs {needed}; wanted a function of no arguments"
        raise SubjectError(reference=reference, problem=problem)
    found: Callable[[], Any] = function
    return found


def _nearest(name: str, module: Any) -> str:
    """The function of the module whose name is most like this one, for a message; nothing if it has none."""
    known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("__")]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f": the nearest is {near[0]!r}" if near else ", and no function at all"


def _leave_out_py(module_name: str, function: str) -> str:
    """What to write instead of the path of a file, for a message."""
    if not module_name.endswith(".py"):
        return ""
    path = Path(module_name).with_suffix("")
    module = ".".join(path.parts) if all(part.isidentifier() for part in path.parts) else path.name
    return f"; leave out .py: {f'{module}:{function}'!r}"


def _import_module(name: str, function: str, reference: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is not: its own traceback says more
        problem = f"there is no module {error.name!r}{_leave_out_py(name, function)}"
        raise SubjectError(reference=reference, problem=problem) from error


def _needed_arguments(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    return ", ".join(repr(name) for name in needed)
