"""What is known of values in HLO that nothing here compiles to: asynchronous forms, odd groups, callbacks."""

from __future__ import annotations

import jax
import pytest

import jaxsync
from jaxsync.hlo import parse_module
from jaxsync.variance import Value, analyse

GROUPS = "replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true"
HLO = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%max (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %most = f32[] maximum(%a, %b)
}}

ENTRY %main (x: f32[4], w: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %w = f32[4]{{0}} parameter(1)
{body}
}}
"""


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jaxsync.make_mesh({"data": 4, "model": 2})


def result(mesh, *lines: str) -> tuple[list[str], Value]:
    """The axes of each reduction, and what is known of the result; x varies over data, w over nothing."""
    body = "\n".join(f"  {line.replace('GROUPS', GROUPS)}" for line in lines)
    flow = analyse(parse_module(HLO.format(body=body)), mesh, [frozenset({"data"}), frozenset()])
    [value] = flow.results
    return [",".join(sorted(reduction.axes)) for reduction in flow.reductions], value


@pytest.mark.parametrize(
    ("lines", "varies", "sums"),
    [
        (("ROOT %r = f32[4]{0} add(%x, %w)",), {"data"}, []),
        (("ROOT %r = f32[4]{0} all-reduce(%x), GROUPS, to_apply=%add",), set(), ["data"]),
        (("ROOT %r = f32[4]{0} all-reduce(%x), GROUPS, to_apply=%max",), set(), []),
        (
            (
                "%s = f32[4]{0} all-reduce-start(%x), GROUPS, to_apply=%add",
                "ROOT %r = f32[4]{0} all-reduce-done(%s)",
            ),
            set(),
            ["data"],
        ),
        (
            (
                "%s = (f32[4]{0}, f32[16]{0}) all-gather-start(f32[4]{0} %x), GROUPS, dimensions={0}",
                "%d = f32[16]{0} all-gather-done((f32[4]{0}, f32[16]{0}) %s)",
                "ROOT %r = f32[4]{0} slice(f32[16]{0} %d), slice={[0:4]}",
            ),
            set(),
            [],
        ),
        (("ROOT %r = f32[4]{0} reduce-scatter(%w), GROUPS, to_apply=%add",), {"data"}, ["data"]),
        (("ROOT %r = f32[4]{0} all-to-all(%w), GROUPS",), {"data"}, []),
        (
            ("ROOT %r = f32[4]{0} collective-permute(%w), source_target_pairs={{0,1}}",),
            {"data", "model"},
            [],
        ),
        (
            ("ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={{0,3},{1,2},{4,5},{6,7}}, to_apply=%add",),
            {"data", "model"},
            [],
        ),
        (('ROOT %r = f32[4]{0} custom-call(%w), custom_call_target="lapack_sgetrf"',), set(), []),
        (
            ('ROOT %r = f32[4]{0} custom-call(%w), custom_call_target="xla_ffi_python_cpu_callback"',),
            {"data", "model"},
            [],
        ),
        (("%id = u32[] partition-id()", "ROOT %r = f32[4]{0} convert(%id)"), {"data", "model"}, []),
        (
            (
                "%t = (f32[4]{0}, f32[4]{0}) tuple(%x, %w)",
                "ROOT %r = f32[4]{0} get-tuple-element(%t), index=1",
            ),
            set(),
            [],
        ),
        (
            (
                "%t = (f32[4]{0}, f32[4]{0}) all-reduce(%x, %w), GROUPS, to_apply=%add",
                "ROOT %r = f32[4]{0} get-tuple-element(%t), index=0",
            ),
            set(),
            ["data"],
        ),
        (("ROOT %r = f32[4]{0} parameter(7)",), {"data", "model"}, []),
    ],
)
def test_what_is_known_of_a_result(mesh, lines: tuple[str, ...], varies: set[str], sums: list[str]) -> None:
    found, value = result(mesh, *lines)
    assert (found, set(value.varies)) == (sums, varies)


def test_a_constant_depends_on_no_argument_and_a_sum_is_remembered(mesh) -> None:
    assert result(mesh, "ROOT %r = f32[4]{0} constant({1, 2, 3, 4})")[1] == Value(varies=frozenset())
    reduced = result(mesh, "ROOT %r = f32[4]{0} all-reduce(%x), GROUPS, to_apply=%add")[1]
    assert reduced == Value(varies=frozenset(), summed=frozenset({"data"}), is_given=True)
