"""What types say about values, where they say anything."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import UnboundAxisError
from jaxsync.ingraph.axes import AxisState, axis_state, is_bound, make_varying, typed_axes


def states(way: str) -> dict[str, AxisState]:
    """The states of some values over "data", as seen while tracing in one way."""
    seen: dict[str, AxisState] = {}

    def look(x: jax.Array, w: jax.Array) -> jax.Array:
        typed = typed_axes(("data",))
        reduced = jax.lax.pcast(w, "data", to="reduced") if typed else w
        values = {
            "row": x,
            "replicated": w,
            "sum": jax.lax.psum(x, "data"),
            "made varying": make_varying([w], ("data",))[0],
        }
        if typed:
            values["cotangent of reduced"] = jax.grad(lambda w: (w * x).sum())(reduced)
        seen.update({name: axis_state(value, "data", typed) for name, value in values.items()})
        return x

    mesh = jaxsync.make_mesh({"data": 4})
    rows, w = jnp.arange(4.0), jnp.float32(1)
    ways: dict[str, Any] = {
        "checked": lambda: jax.jit(
            jax.shard_map(look, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        )(rows, w),
        "unchecked": lambda: jax.shard_map(
            look, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False
        )(rows, w),
        "pmap": lambda: jax.pmap(look, axis_name="data", in_axes=(0, None), devices=jax.devices()[:4])(
            rows, w
        ),
        "vmap": lambda: jax.vmap(look, axis_name="data", in_axes=(0, None))(rows, w),
    }
    ways[way]()
    return seen


def test_under_check_vma_every_state_is_known() -> None:
    assert states("checked") == {
        "row": AxisState.VARYING,
        "replicated": AxisState.INVARYING,
        "sum": AxisState.INVARYING,
        "made varying": AxisState.VARYING,
        "cotangent of reduced": AxisState.UNREDUCED,
    }


@pytest.mark.parametrize("way", ["unchecked", "pmap", "vmap"])
def test_elsewhere_none_is(way: str) -> None:
    assert set(states(way).values()) == {AxisState.UNKNOWN}


def test_no_axis_is_bound_outside() -> None:
    assert not is_bound("data")
    assert typed_axes(("data",)) == ()


def test_making_varying_twice_is_making_varying() -> None:
    mesh = jaxsync.make_mesh({"data": 4})

    def look(w: jax.Array) -> jax.Array:
        once = make_varying([w], ("data",))
        assert make_varying(once, ("data",))[0] is once[0]
        return once[0][None]

    assert jax.shard_map(look, mesh=mesh, in_specs=P(), out_specs=P("data"))(jnp.float32(2)).shape == (4,)


@pytest.mark.parametrize("way", ["pmap", "shard_map"])
def test_an_axis_that_is_not_bound_is_told_beside_those_that_are(way: str) -> None:
    plan = jaxsync.make_plan({"w": jnp.zeros(())}, jaxsync.make_mesh({"data": 4}))
    sync = lambda g: jaxsync.sync_gradients({"w": g.sum()}, plan)  # noqa: E731
    ways: dict[str, Any] = {
        "pmap": jax.pmap(sync, axis_name="batch", devices=jax.devices()[:4]),
        "shard_map": jax.shard_map(
            sync, mesh=jaxsync.make_mesh({"batch": 4}), in_specs=P("batch"), out_specs=P()
        ),
    }
    with pytest.raises(UnboundAxisError) as caught:
        ways[way](jnp.arange(4.0))
    assert (caught.value.axes, caught.value.bound) == (("data",), ("batch",))
