from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync import SyncConfig, make_mesh, make_plan
from jaxsync.errors import ArgumentError, ConfigError, MeshError

TREE = {"w": jnp.ones((4, 3)), "b": jnp.ones(3, jnp.bfloat16), "n": jnp.int32(1)}


def test_equal_registrations_make_equal_plans() -> None:
    first, second = (make_plan(TREE, make_mesh({"data": 8})) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_plan({**TREE, "v": jnp.ones(1)}, make_mesh({"data": 8})),
        lambda: make_plan({**TREE, "w": jnp.ones((3, 4))}, make_mesh({"data": 8})),
        lambda: make_plan({**TREE, "w": jnp.ones((4, 3), jnp.float16)}, make_mesh({"data": 8})),
        lambda: make_plan(TREE, make_mesh({"data": 4})),
        lambda: make_plan(TREE, make_mesh({"data": 8}), config=SyncConfig(reduce="sum")),
        lambda: make_plan(TREE, make_mesh({"data": 8}), config=SyncConfig(bucket_max_leaves=1)),
        lambda: make_plan(TREE, make_mesh({"data": 4, "model": 2})),
    ],
)
def test_anything_that_changes_the_sync_changes_the_fingerprint(other) -> None:
    assert other().fingerprint != make_plan(TREE, make_mesh({"data": 8})).fingerprint


def test_the_fingerprint_does_not_depend_on_the_hash_seed(run_python) -> None:
    code = """
        import jax, jaxsync
        jaxsync.simulate_devices(2)
        tree = {"w": jax.ShapeDtypeStruct((4, 3), "float32"), "b": jax.ShapeDtypeStruct((3,), "bfloat16")}
        print(jaxsync.make_plan(tree, jaxsync.make_mesh({"data": 2})).fingerprint)
    """
    assert len({run_python(code, PYTHONHASHSEED=str(seed)).stdout for seed in range(3)}) == 1


def test_printing_a_plan_shows_buckets_bytes_and_totals() -> None:
    plan = make_plan(TREE, make_mesh({"data": 8}))
    assert str(plan).splitlines() == [
        "SyncPlan over mesh (data=8), mean over data",
        "bucket  leaves  axes  wire                 elements  bytes  first leaf",
        "------  ------  ----  -------------------  --------  -----  ----------",
        "     0       1  data  bfloat16 as float32         3   12 B  ['b']",
        "     1       1  data  float32                    12   48 B  ['w']",
        "3 leaves (1 pass through), 2 buckets, 1 all-reduce, 60 B a step and device",
        f"fingerprint {plan.fingerprint[:16]}",
    ]


def test_a_plan_keeps_no_array_alive() -> None:
    before = len(jax.live_arrays())
    plan = make_plan({"w": jnp.ones(1000)}, make_mesh({"data": 8}))
    assert len(jax.live_arrays()) == before
    assert plan.leaves[0].shape == (1000,)


def test_a_plan_is_a_static_argument_that_compiles_once() -> None:
    traces = []

    def step(plan: jaxsync.SyncPlan, x: jax.Array) -> jax.Array:
        traces.append(plan)
        return x

    compiled = jax.jit(step, static_argnums=0)
    for _ in range(3):
        compiled(make_plan(TREE, make_mesh({"data": 8})), jnp.ones(2))
    assert len(traces) == 1


def test_a_mesh_without_the_data_axis_is_refused() -> None:
    with pytest.raises(MeshError, match="names 'data', which the mesh does not have") as caught:
        make_plan(TREE, make_mesh({"batch": 8}))
    assert 'config=SyncConfig(axis="batch")' in caught.value.fix()
    with pytest.raises(MeshError, match='or whichever of "x", "y" carries the batch'):
        make_plan(TREE, make_mesh({"x": 4, "y": 2}))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_any_mesh_is_taken(kind: AxisType) -> None:
    import numpy as np

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(kind, kind))
    assert make_plan(TREE, mesh).num_replicas == 4
    assert make_plan(TREE, mesh, config=SyncConfig(axis=("data", "model"))).num_replicas == 8
    abstract = AbstractMesh((512,), ("data",), axis_types=(kind,))
    assert make_plan(TREE, abstract).num_replicas == 512


def test_specs_come_back_as_the_tree() -> None:
    mesh = make_mesh({"data": 4, "model": 2})
    specs = {"w": P("model"), "b": P(), "n": P()}
    assert make_plan(TREE, mesh, specs).specs == specs


def test_arguments_of_another_kind_are_named() -> None:
    mesh = make_mesh({"data": 8})
    with pytest.raises(ArgumentError, match="mesh = a dict; wanted a jax"):
        make_plan(mesh, TREE)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="config = a dict; wanted a SyncConfig"):
        make_plan(TREE, mesh, None, {"reduce": "sum"})  # type: ignore[arg-type]
    wanted = "wanted a prefix tree of PartitionSpecs"
    for specs, text in (
        (SyncConfig(), f"make_plan got specs = a SyncConfig; {wanted}; pass it as config=."),
        (mesh, f"make_plan got specs = a Mesh; {wanted}."),
        ("data", f"make_plan got specs = 'data'; {wanted}."),
    ):
        with pytest.raises(ArgumentError) as caught:
            make_plan(TREE, mesh, specs)
        assert str(caught.value).splitlines()[0] == text


def test_a_64_bit_wire_needs_64_bits() -> None:
    config = SyncConfig(reduce_dtype="float64")
    with pytest.raises(ConfigError, match="JAX computes in 32 bits unless jax_enable_x64 is set"):
        make_plan(TREE, make_mesh({"data": 8}), config=config)
    with jax.enable_x64(True):
        assert make_plan(TREE, make_mesh({"data": 8}), config=config).buckets[0].dtype == "float64"
