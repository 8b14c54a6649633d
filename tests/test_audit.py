"""Collectives counted in real compiled programs, and in every form HLO writes groups of devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.audit import parse_hlo


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jaxsync.make_mesh({"data": 4, "model": 2})


def mapped(mesh, fn, rows=("data",)):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(rows), out_specs=P(), check_vma=False))


@pytest.mark.parametrize(
    ("kind", "fn", "num_bytes"),
    [
        ("all-reduce", lambda x: lax.psum(x, "data"), 12),
        ("reduce-scatter", lambda x: lax.psum_scatter(jnp.tile(x, (4, 1)), "data", tiled=True), 12),
        ("all-gather", lambda x: lax.all_gather(x, "data"), 48),
        ("all-to-all", lambda x: lax.all_to_all(jnp.tile(x, (4, 1)), "data", 0, 0), 48),
        ("collective-permute", lambda x: lax.ppermute(x, "data", [(0, 1)]), 12),
    ],
)
def test_every_kind_is_counted_with_its_bytes(mesh, kind: str, fn, num_bytes: int) -> None:
    audit = jaxsync.audit(mapped(mesh, fn), jnp.ones((4, 3)))
    assert [(c.kind, c.num_bytes, c.in_loop) for c in audit.collectives] == [(kind, num_bytes, False)]
    assert audit.count(kind) == 1
    assert audit.num_bytes == num_bytes


@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model")])
def test_the_axes_of_a_collective_are_named(mesh, axes: tuple[str, ...]) -> None:
    audit = jaxsync.audit(mapped(mesh, lambda x: lax.psum(x, axes), ("data", "model")), jnp.ones(8))
    [found] = audit.collectives
    assert found.axes == axes
    assert found.group_size == int(np.prod([mesh.shape[axis] for axis in axes]))


@pytest.mark.parametrize("loop", ["scan", "while", "nested"])
def test_a_collective_in_a_loop_is_told(mesh, loop: str) -> None:
    def body(carry, _):
        return lax.psum(carry, "data") / 5, None

    def fn(x):
        if loop == "while":
            return lax.while_loop(lambda v: v.sum() < 1e9, lambda v: lax.psum(v, "data"), x)
        if loop == "nested":
            return lax.scan(lambda c, _: (lax.scan(body, c, None, length=2)[0], None), x, None, length=3)[0]
        return lax.scan(body, x, None, length=5)[0]

    audit = jaxsync.audit(mapped(mesh, fn), jnp.ones((4, 3)))
    assert [c.in_loop for c in audit.collectives] == [True]
    assert len(audit.in_loop) == 1
    assert "yes" in str(audit)


def test_a_collective_beside_a_loop_is_not_in_it(mesh) -> None:
    fn = lambda x: lax.psum(lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=5)[0], "data")  # noqa: E731
    assert [c.in_loop for c in jaxsync.audit(mapped(mesh, fn), jnp.ones((4, 3))).collectives] == [False]


def test_a_program_without_collectives_says_so() -> None:
    audit = jaxsync.audit(lambda x: x + 1, jnp.ones(3))
    assert audit.collectives == ()
    assert str(audit) == "no collectives"


def test_the_table_shows_what_runs_where(mesh) -> None:
    audit = jaxsync.audit(mapped(mesh, lambda x: lax.psum((x, x + 1), "data")), jnp.ones((4, 3)))
    header, _, row = str(audit).splitlines()
    assert header.split() == ["kind", "axes", "operands", "dtypes", "bytes", "in", "loop", "from"]
    assert row.split()[:6] == ["all-reduce", "data", "2", "f32", "24", "B"]


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted one of all-reduce"):
        jaxsync.audit(lambda x: x, jnp.ones(1)).count("all_reduce")


HLO = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %r = f32[4]{{0}} all-reduce(%p), channel_id=1, {groups}, use_global_device_ids=true, to_apply=%add
}}
"""


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data",)),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("data", "model")),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("replica_groups={{0,3},{1,2},{4,5},{6,7}}", None),
        ("replica_groups=[4,2]<=[8]", ("model",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data",)),
        ("replica_groups=mesh['data'=4,'model'=2] {'data'}", ("data",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("model",)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0'}", ("data", "model")),
        ("replica_groups={}", None),
    ],
)
def test_every_form_of_groups_is_read(mesh, groups: str, axes: tuple[str, ...] | None) -> None:
    text = HLO.format(groups=groups)
    [found] = parse_hlo(text, mesh).collectives
    assert found.axes == axes
    assert found.num_bytes == 16


def test_asynchronous_forms_count_once_with_the_bytes_of_their_result(mesh) -> None:
    text = HLO.format(groups="replica_groups=[2,4]<=[4,2]T(1,0)").replace(
        "ROOT %r = f32[4]{0} all-reduce(%p)", "%s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p)"
    )
    done = "  ROOT %d = f32[16]{0} all-gather-done(%s)\n}\n"
    audit = parse_hlo(text[: text.rindex("}")] + done, mesh)
    assert [(c.kind, c.num_bytes) for c in audit.collectives] == [("all-gather", 64)]


def test_contexts_of_the_transport_are_no_operands(mesh) -> None:
    text = HLO.format(groups="source_target_pairs={{0,1}}").replace(
        "ROOT %r = f32[4]{0} all-reduce(%p)",
        "ROOT %s = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%p)",
    )
    [found] = parse_hlo(text, mesh).collectives
    assert (found.num_operands, found.num_bytes) == (1, 16)


def test_small_and_odd_dtypes_have_their_bytes(mesh) -> None:
    text = HLO.format(groups="replica_groups=[1,8]<=[8]")
    for dtype, num_bytes in {"bf16": 8, "pred": 4, "s4": 2, "f8e4m3fn": 4, "c64": 32, "f64": 32}.items():
        swapped = text.replace("ROOT %r = f32[4]", f"ROOT %r = {dtype}[4]")
        assert parse_hlo(swapped, mesh).num_bytes == num_bytes
