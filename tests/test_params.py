"""What a leaf is, and which trees and specs are refused."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsync import make_mesh, make_plan
from jaxsync.errors import RegistrationError, SpecError

TREE = {"a": {"w": jnp.ones((4, 6)), "b": jnp.ones(6)}, "c": [jnp.ones(2), None, jnp.ones(8)]}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return make_mesh({"data": 4, "model": 2})


def test_every_leaf_has_its_path_shape_spec_and_axes(mesh) -> None:
    specs = {"a": {"w": P(None, "model"), "b": P()}, "c": P("model")}
    plan = make_plan(TREE, mesh, specs)
    table = [(x.path, x.shape, x.local_shape, x.spec, x.reduce_axes) for x in plan.leaves]
    assert table == [
        ("['a']['b']", (6,), (6,), P(), ("data",)),
        ("['a']['w']", (4, 6), (4, 3), P(None, "model"), ("data",)),
        ("['c'][0]", (2,), (1,), P("model"), ("data",)),
        ("['c'][2]", (8,), (4,), P("model"), ("data",)),
    ]


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (jnp.ones(2), "float"),
        (jnp.ones(2, jnp.bfloat16), "float"),
        (jnp.ones(2, jnp.float8_e4m3fn), "float"),
        (jnp.ones(2, jnp.complex64), "complex"),
        (jnp.ones(2, jnp.int8), "integer"),
        (jnp.ones(2, bool), "bool"),
        (jax.random.key(0), "key"),
        (jax.random.PRNGKey(0), "integer"),
        (np.zeros(2, jax.dtypes.float0), "float0"),
        (jnp.ones((0, 3)), "empty"),
        (np.float32(1), "float"),
        (jax.ShapeDtypeStruct((2,), "float32"), "float"),
    ],
)
def test_the_kind_decides_what_is_synced(mesh, leaf, kind: str) -> None:
    [found] = make_plan([leaf], mesh).leaves
    assert found.kind == kind
    assert found.is_synced == (kind in ("float", "complex"))


def test_a_leaf_that_is_no_array_is_named(mesh) -> None:
    tree = {"w": jnp.ones(3), "lr": 0.1, "act": jnp.tanh, "s": "x", "o": np.array([None])}
    with pytest.raises(RegistrationError) as caught:
        make_plan(tree, mesh)
    assert [path for path, _ in caught.value.leaves] == ["['act']", "['lr']", "['o']", "['s']"]
    assert caught.value.leaves[1] == ("['lr']", "float")


@pytest.mark.parametrize("dtype", [">f4", "longdouble", "datetime64[s]", "U3", "S3", "f4,i4", "V8", "O"])
def test_numpy_arrays_that_jax_cannot_hold_are_refused(mesh, dtype: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        make_plan({"w": np.zeros(2, dtype)}, mesh)
    assert caught.value.leaves[0][1] == f"ndarray of {np.dtype(dtype)}"


def test_64_bits_of_numpy_are_32_without_x64(mesh) -> None:
    tree = {"w": np.ones(3), "n": np.arange(3)}
    assert [leaf.dtype for leaf in make_plan(tree, mesh).leaves] == ["int32", "float32"]
    with jax.enable_x64(True):
        assert [leaf.dtype for leaf in make_plan(tree, mesh).leaves] == ["int64", "float64"]


def test_a_tree_without_an_order_is_refused(mesh) -> None:
    with pytest.raises(RegistrationError, match="tree that JAX cannot flatten"):
        make_plan({1: jnp.ones(2), "a": jnp.ones(2)}, mesh)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (P("model", None, None), "the spec has 3 entries for 2 dims"),
        (P("tensor"), "the mesh has no axis 'tensor'"),
        (P("model", "model"), "an axis is used twice"),
        (P(None, "model"), "dim 1 of size 3 does not divide over 2 devices"),
        (P(P.UNCONSTRAINED), "UNCONSTRAINED leaves the sharding open"),
        (P(unreduced={"data"}), "unreduced and reduced axes are for gradients, not for parameters"),
        (P(1), "1 is no axis name"),
    ],
)
def test_a_spec_that_does_not_fit_is_named_with_its_reason(mesh, spec, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan({"w": jnp.ones((4, 3))}, mesh, {"w": spec})
    assert caught.value.leaves[0][0] == "['w']"
    assert caught.value.leaves[0][3] == reason


NT = collections.namedtuple("NT", ["a", "b"])
NT2 = collections.namedtuple("NT2", ["a", "b"])
NOTHING = "specs has nothing for it"
ASTRAY = "specs has it, and the parameters have nothing there"
NODES = {"v": [jnp.ones(3)], "w": jnp.ones(4), "n": NT(jnp.ones(2), None), "o": None, "e": {}}
FIT = {"v": P(), "w": P(), "n": P(), "o": None, "e": {}}


@pytest.mark.parametrize(
    ("specs", "places"),
    [
        ({**FIT, "n": NT2(P(), None)}, ["params['n']: specs has an NT2 where the parameters have an NT"]),
        ({**FIT, "v": (P(),)}, ["params['v']: specs has a tuple where the parameters have a list"]),
        ({**FIT, "v": [P(), None]}, [f"params['v'][1] with None: {ASTRAY}"]),
        ({**FIT, "v": []}, [f"params['v'][0] (3,) with no spec: {NOTHING}"]),
        ({**FIT, "w": {"q": None}}, ["params['w']: specs has a dict where the parameters have a leaf"]),
        ({**FIT, "o": {}}, ["params['o']: specs has a dict where the parameters have None"]),
        ({**FIT, "x": P("data")}, [f"params['x'] with {P('data')!r}: {ASTRAY}"]),
        ({**FIT, "x": {"y": P()}}, [f"params['x']: {ASTRAY}"]),
        (
            {"v": P(), "n": NT2(P(), None)},
            [
                f"params['e'] with no spec: {NOTHING}",
                "params['n']: specs has an NT2 where the parameters have an NT",
                f"params['o'] with no spec: {NOTHING}",
                f"params['w'] (4,) with no spec: {NOTHING}",
            ],
        ),
        ([P()], ["params: specs has a list where the parameters have a dict"]),
        (
            collections.OrderedDict(FIT),
            ["params: specs has an OrderedDict where the parameters have a dict"],
        ),
    ],
)
def test_specs_that_are_no_prefix_are_named_where_they_leave_the_tree(mesh, specs, places) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(NODES, mesh, specs)
    assert caught.value.places() == places


def test_specs_that_differ_in_order_or_in_a_type_of_one_name_say_so(mesh) -> None:
    first, second = jnp.ones(2), jnp.ones(3)
    ordered = collections.OrderedDict
    with pytest.raises(SpecError) as caught:
        make_plan(ordered(a=first, b=second), mesh, ordered(b=P(), a=P()))
    assert caught.value.places() == [
        "params: specs has an OrderedDict whose static parts, or their order, are not those of the parameters"
    ]
    Other = collections.namedtuple("NT", ["a", "b"], module="elsewhere")
    with pytest.raises(SpecError) as caught:
        make_plan(NT(first, second), mesh, Other(P(), P()))
    assert caught.value.places() == [
        f"params: specs has an NT of elsewhere where the parameters have an NT of {__name__}"
    ]


def test_a_path_that_only_begins_alike_is_no_branch(mesh) -> None:
    Pair = collections.namedtuple("Pair", ["w", "w2"])
    with pytest.raises(SpecError) as caught:
        make_plan(Pair(jnp.ones(4), jnp.ones(4)), mesh, Pair(P(), ()))
    assert [path for path, *_ in caught.value.leaves] == [".w2"]


def test_specs_that_are_none_are_refused(mesh) -> None:
    with pytest.raises(SpecError, match="wanted a PartitionSpec"):
        make_plan({"w": jnp.ones(4)}, mesh, {"w": "model"})


def test_a_spec_over_a_data_axis_says_along_which_dims_the_gradient_is_scattered(mesh) -> None:
    specs = {"w": P(None, ("model", "data")), "v": P("data", "model"), "b": P()}
    plan = make_plan({"w": jnp.ones((4, 16)), "v": jnp.ones((8, 2)), "b": jnp.ones(3)}, mesh, specs)
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    w, v, b = leaves["['w']"], leaves["['v']"], leaves["['b']"]
    assert (w.local_shape, w.whole_shape, w.scatter_dims) == ((4, 2), (4, 8), ((1, ("data",)),))
    assert (v.local_shape, v.whole_shape, v.scatter_dims) == ((2, 1), (8, 1), ((0, ("data",)),))
    assert (b.local_shape, b.whole_shape, b.scatter_dims, b.reduce_axes) == ((3,), (3,), (), ("data",))
    assert w.reduce_axes == v.reduce_axes == ()
    assert (plan.num_all_reduces, plan.num_reduce_scatters) == (1, 1)


def test_placed_arrays_keep_their_spec_and_others_are_replicated(mesh) -> None:
    placed = jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh, P(None, "model")))
    elsewhere = jax.device_put(jnp.ones(8), NamedSharding(make_mesh({"x": 8}), P("x")))
    plan = make_plan({"w": placed, "v": elsewhere, "b": jnp.ones(3)}, mesh)
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "['w']": P(None, "model"),
        "['v']": P(),
        "['b']": P(),
    }


def test_none_in_the_tree_takes_no_spec(mesh) -> None:
    plan = make_plan({"w": None, "v": jnp.ones(2)}, mesh, P())
    assert [leaf.path for leaf in plan.leaves] == ["['v']"]
