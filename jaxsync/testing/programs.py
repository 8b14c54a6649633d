"""Assertions about compiled programs: what they communicate, what they return, when they are compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxsync.audit import KINDS, Audit, audit
from jaxsync.errors import (
    ArgumentError,
    CollectiveCountError,
    RecompiledError,
    ReplicaMismatchError,
    ReplicasDifferError,
)
from jaxsync.placement import check_replicas_equal
from jaxsync.testing.blocks import quiet

_COMPILED = "/jax/core/compile/backend_compile_duration"  # sent once for each program, with its name


def count_collectives(fn: Any, *args: Any) -> dict[str, int]:
    """How many collectives of each kind the compiled `fn` has; kinds that do not occur are left out.

    Compiles, and runs nothing. Those in loops count once: `jaxsync.audit` tells which they are.

    Args:
        fn: As for `jaxsync.audit`: a `TrainStep`, a jitted function, or a plain one.
        *args: Arrays or `jax.ShapeDtypeStruct`s.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jaxsync.make_mesh({"data": 8})
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> count_collectives(total, jnp.ones(8))
    {'all_reduce': 1}
    """
    __tracebackhide__ = True
    return _counts(audit(fn, *args))


def assert_collectives(fn: Any, args: Sequence[Any], *, in_loop: bool = False, **counts: int) -> None:
    """Asserts that the compiled `fn` has exactly these collectives.

    Compiles, and runs nothing.

    Args:
        fn: As for `jaxsync.audit`.
        args: Its arguments, as a tuple or list.
        in_loop: Whether collectives may stand inside loops, where each runs any number of times.
        **counts: How many of each kind: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`,
            `ragged_all_to_all`, `collective_permute`, `collective_broadcast`. There must be none of a kind
            that is not named.

    Raises:
        CollectiveCountError: It has others, or some in a loop. Shows all it has.
        ArgumentError: There is no such kind.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jaxsync.make_mesh({"data": 8})
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> assert_collectives(total, (jnp.ones(8),), all_reduce=1)
    """
    __tracebackhide__ = True
    known = [_keyword(kind) for kind in KINDS]
    for name in counts:
        if name not in known:
            wanted = f"one of {', '.join(known)}"
            raise ArgumentError(
                function="testing.assert_collectives", argument="a kind", got=name, wanted=wanted
            )
    report = audit(fn, *args)
    found = _counts(report)
    problems = [
        f"{kind}: has {found.get(kind, 0)}; wanted {counts.get(kind, 0)}"
        for kind in known
        if found.get(kind, 0) != counts.get(kind, 0)
    ]
    if report.in_loop and not in_loop:
        problems.append(f"{len(report.in_loop)} in a loop: allow that with in_loop=True")
    if problems:
        raise CollectiveCountError(problems=tuple(problems), table=str(report))


def _keyword(kind: str) -> str:
    return kind.replace("-", "_")


def _counts(report: Audit) -> dict[str, int]:
    return {_keyword(kind): count for kind in KINDS if (count := report.count(kind))}


def assert_replicas_equal(tree: Any) -> None:
    """Asserts that arrays hold the same bits on every device that should hold the same.

    `Array.is_fully_replicated` does not look at values: this reads every addressable shard. NaNs of equal
    bits are equal. What is no `jax.Array` is left out.

    Raises:
        ReplicasDifferError: Names each leaf, and two devices that differ.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jaxsync.make_mesh({"data": 8})
    >>> assert_replicas_equal({"w": jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))})
    """
    __tracebackhide__ = True
    try:
        check_replicas_equal(tree)
    except ReplicaMismatchError as error:
        raise ReplicasDifferError(leaves=error.leaves) from None


@quiet
@contextlib.contextmanager
def no_recompile() -> Iterator[None]:
    """A block in which nothing is compiled: a second step that costs as much as the first is a common fault.

    Every program counts, those of operations outside `jit` too; so call everything once before. A program
    that another thread compiles meanwhile counts as well.

    Raises:
        RecompiledError: At the end of the block: names each function that was compiled.

    >>> import jax, jax.numpy as jnp
    >>> double = jax.jit(lambda x: 2 * x)
    >>> x = double(jnp.ones(3))
    >>> with no_recompile():
    ...     x = double(x)
    """
    found: list[str] = []

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        if event == _COMPILED:
            found.append(str(facts.get("fun_name", "a program without a name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if found:
        raise RecompiledError(functions=tuple(found))
