"""Every error: its whole text, its builtin base, and its way through pickle."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from jaxsync import errors

EXAMPLES = [
    (
        errors.ConfigError(source="a.toml", problems=("unknown key 'axes': the nearest is 'axis'",)),
        ValueError,
        "The configuration in a.toml is not valid.\n"
        "  - unknown key 'axes': the nearest is 'axis'\n"
        "To fix it: correct the keys above; `jaxsync.SyncConfig` documents every key of the sync table.",
    ),
    (
        errors.MissingExtraError(feature="jaxsync train", package="optax", extra="train"),
        ImportError,
        "jaxsync train needs the package 'optax', which is not installed.\n"
        "To fix it: pip install 'jaxsync[train]'",
    ),
    (
        errors.BackendStartedError(
            asked=8, found="JAX has already started with 1 cpu device", causes=("module 'm' holds 'x'",)
        ),
        RuntimeError,
        "Cannot simulate 8 CPU devices: JAX has already started with 1 cpu device.\n"
        "  - module 'm' holds 'x'\n"
        "To fix it: call jaxsync.simulate_devices(n) once, before anything makes an array or lists devices, "
        "and restart the process (in Jupyter: the kernel). JAX_DEBUG_LOG_MODULES=jax._src.xla_bridge shows "
        "when the backend starts.",
    ),
    (
        errors.DeviceCountError(asked=8, found=1, platform="platform cpu"),
        RuntimeError,
        "The mesh needs 8 devices; JAX has 1 (platform cpu).\n"
        "To fix it: make a smaller mesh, or simulate the devices: jaxsync.simulate_devices(8) before the "
        "first use of JAX.",
    ),
    (
        errors.MeshError(
            mesh="data=8", problems=("SyncConfig.axis names 'd', which the mesh does not have",)
        ),
        ValueError,
        "The mesh (data=8) does not fit.\n"
        "  - SyncConfig.axis names 'd', which the mesh does not have\n"
        "To fix it: make the plan for the mesh it runs on: SyncConfig(axis=...) names the data axes of that "
        "mesh.",
    ),
    (
        errors.RegistrationError(leaves=(("['act']", "function"),)),
        ValueError,
        "1 leaf of the parameter tree cannot be synced: no array.\n"
        "  - params['act'] is a function\n"
        "To fix it: register arrays or jax.ShapeDtypeStructs only: wrap numbers in jnp.asarray, and take "
        "functions and strings out of the tree (equinox: eqx.filter(model, eqx.is_array)).",
    ),
    (
        errors.SpecError(leaves=(("['w']", "(3,)", "PartitionSpec('x',)", "the mesh has no axis 'x'"),)),
        ValueError,
        "1 partition spec does not fit.\n"
        "  - params['w'] (3,) with PartitionSpec('x',): the mesh has no axis 'x'\n"
        "To fix it: give each leaf a PartitionSpec of at most its rank, whose axes are in the mesh, used "
        "once, and whose sizes divide the dims; `specs` may be a prefix of the parameter tree.",
    ),
    (
        errors.DataShardedError(leaves=(("['w']", "PartitionSpec('data',)"),), axes=("data",)),
        NotImplementedError,
        "Parameters sharded over a data axis ('data') are not supported yet.\n"
        "  - params['w'] with PartitionSpec('data',)\n"
        "To fix it: replicate these leaves over the data axes: pass specs=jax.sharding.PartitionSpec(), or "
        "place the arrays without that axis.",
    ),
    (
        errors.ReplicaMismatchError(leaves=(("['w']", "TFRT_CPU_0", "TFRT_CPU_1"),)),
        ValueError,
        "The replicas of 1 array hold different values.\n"
        "  - params['w']: TFRT_CPU_0 and TFRT_CPU_1 differ\n"
        "To fix it: start every device from the same values: build the array from one host copy with "
        "jax.device_put(value, NamedSharding(mesh, spec)).",
    ),
    (
        errors.TreeMismatchError(problems=("grads['w'] is missing", "grads['v'] is not in the plan")),
        ValueError,
        "2 leaves do not fit the plan.\n"
        "  - grads['w'] is missing\n"
        "  - grads['v'] is not in the plan\n"
        "To fix it: pass the tree the plan was made for, with its shapes and dtypes; make a new plan when "
        "the parameters change.",
    ),
    (
        errors.UnboundAxisError(function="sync_gradients", axes=("data",)),
        NameError,
        "sync_gradients reduces over 'data', which is not bound here.\n"
        "To fix it: call it inside jax.shard_map over the plan's mesh, or inside jax.pmap(axis_name=...). "
        "Under plain jit on a sharded batch, gradients are global already and need no sync.",
    ),
    (
        errors.AlreadyReducedError(leaves=("['w']",), axes=("data",)),
        ValueError,
        "1 gradient is already reduced over 'data': to reduce again would multiply by the number of "
        "devices, silently.\n"
        "  - grads['w']\n"
        "To fix it: under shard_map(check_vma=True), jax.grad with respect to replicated parameters sums "
        "the gradients itself. Differentiate with jaxsync.value_and_grad(loss_fn, plan), which syncs too; "
        "or make the parameters varying before jax.grad: jax.lax.pcast(params, ('data',), to='varying'). "
        "Sync once only.",
    ),
    (
        errors.NotReducedError(function="global_norm", leaves=("['w']",), axes=("data",)),
        ValueError,
        "global_norm needs synced gradients; 1 gradient still varies over 'data', so each device would get "
        "another norm.\n"
        "  - grads['w']\n"
        "To fix it: sync first: jaxsync.sync_gradients(grads, plan), or put jaxsync.synchronize(plan) before "
        "it.",
    ),
    (
        errors.UncheckedModelError(axes=("model",), primitives=("psum",)),
        ValueError,
        "The loss communicates over 'model' (psum) without check_vma: JAX would multiply gradients by the "
        "size of that axis.\n"
        "To fix it: use jax.shard_map(..., check_vma=True), where gradients across a model axis are right; "
        "or wrap the communication in jax.custom_vjp with the backward rule you mean.",
    ),
    (
        errors.LossError(got="float32[4]", wanted="a real float scalar loss"),
        ValueError,
        "loss_fn returned float32[4]; wanted a real float scalar loss.\n"
        "To fix it: return a real scalar, the mean over this device's rows. weighted=True: (loss, weight); "
        "has_aux=True: (loss, aux), or ((loss, weight), aux) with both.",
    ),
    (
        errors.DeletedArrayError(leaves=("state.params['w']",)),
        RuntimeError,
        "1 argument is an array deleted before.\n"
        "  - state.params['w']\n"
        "To fix it: a function that donates an argument reuses its memory: go on with what it returned, copy "
        "what must stay, or do not donate (make_train_step(..., donate=False)).",
    ),
    (
        errors.AliasedArrayError(leaves=(("state.params['a']", "state.params['b']"),)),
        ValueError,
        "A donated state holds the same array more than once; its memory can be reused only once.\n"
        "  - state.params['a'] is also state.params['b']\n"
        "To fix it: make the state with step.init(params), which copies; or copy one of each pair: "
        "jnp.copy(x).",
    ),
    (
        errors.BatchError(leaves=(("['x']", "(9, 3)", "9 rows are no multiple of it"),), divisor=8),
        ValueError,
        "The batch cannot be divided into 8 equal parts (devices x accumulate).\n"
        "  - batch['x'] (9, 3): 9 rows are no multiple of it\n"
        "To fix it: make the leading dim of every batch leaf a multiple of 8; to keep all rows, pad the last "
        "batch and give the padding weight 0 with weighted=True.",
    ),
    (
        errors.DispatchError(asked="64", limit=32),
        ValueError,
        "max_in_flight=64 is not between 1 and 32 (on CPU).\n"
        "To fix it: leave it out (8 on CPU, no window on accelerators): more than 32 un-awaited programs "
        "with collectives abort the process on CPU.",
    ),
]
CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.JaxsyncError) and value is not errors.JaxsyncError
]


def test_every_class_has_an_example() -> None:
    assert {type(error) for error, _, _ in EXAMPLES} == set(CLASSES)


@pytest.mark.parametrize(("error", "builtin", "text"), EXAMPLES, ids=lambda x: type(x).__name__)
def test_text_is_what_where_and_what_to_do(error: errors.JaxsyncError, builtin: type, text: str) -> None:
    assert str(error) == text
    assert isinstance(error, builtin)


@pytest.mark.parametrize("error", [error for error, _, _ in EXAMPLES], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"]
)
def test_an_error_survives_a_journey(error: errors.JaxsyncError, travel: object) -> None:
    arrived = travel(error)  # type: ignore[operator]
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_eight_places_are_shown_and_the_rest_counted() -> None:
    lines = str(errors.TreeMismatchError(problems=tuple(f"leaf {i}" for i in range(20)))).splitlines()
    assert lines[8:10] == ["  - leaf 7", "  - and 12 more"]


@pytest.mark.parametrize(("error", "builtin", "text"), EXAMPLES, ids=lambda x: type(x).__name__)
def test_the_docs_have_a_section_with_the_text_of_each_error(
    error: errors.JaxsyncError, builtin: type, text: str
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    section = page.split(f"## {type(error).__name__}\n")[1].split("\n## ")[0]
    assert f"```text\n{text}\n```" in section
    assert f"(`{builtin.__name__}`)" in section
    for part in ("**Meaning**", "**When**", "**Solutions**", "**Example**"):
        assert part in section


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_tree_in_the_docstring_names_each_error(cls: type) -> None:
    base = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    [line] = [line for line in (errors.__doc__ or "").splitlines() if f" {cls.__name__} " in line]
    assert f"({base.__name__})" in line
