"""Parameters and specs that cannot be planned, and trees that do not fit a plan."""

from __future__ import annotations

from collections.abc import Sequence

from jaxsync.errors.base import JaxsyncError, error, quote_names
from jaxsync.report.text import format_count


@error
class RegistrationError(JaxsyncError, ValueError):
    """A leaf that is no array. `leaves`: path and type of each."""

    leaves: tuple[tuple[str, str], ...]

    def what(self) -> str:
        number = format_count(len(self.leaves), "leaf", "leaves")
        return f"{number} of the parameter tree cannot be synced: no array."

    def places(self) -> Sequence[str]:
        return [f"params{path} is a {kind}" for path, kind in self.leaves]

    def fix(self) -> str:
        return (
            "register arrays or jax.ShapeDtypeStructs only: wrap numbers in jnp.asarray, and take functions "
            "and strings out of the tree (equinox: eqx.filter(model, eqx.is_array))."
        )


@error
class SpecError(JaxsyncError, ValueError):
    """A PartitionSpec that does not fit leaf, mesh or tree. `leaves`: path, shape, spec, reason of each."""

    leaves: tuple[tuple[str, str, str, str], ...]

    def what(self) -> str:
        return f"{format_count(len(self.leaves), 'partition spec does', 'partition specs do')} not fit."

    def places(self) -> Sequence[str]:
        return [
            f"{' '.join(filter(None, (f'params{path}', shape, spec and f'with {spec}')))}: {reason}"
            for path, shape, spec, reason in self.leaves
        ]

    def fix(self) -> str:
        return (
            "give each leaf a PartitionSpec of at most its rank, whose axes are in the mesh, used once, and "
            "whose sizes divide the dims; `specs` may be a prefix of the parameter tree."
        )


@error
class DataShardedError(JaxsyncError, ValueError):
    """Parameters sharded over a data axis where each device needs all. `leaves`: path and spec of each."""

    function: str
    leaves: tuple[tuple[str, str], ...]
    axes: tuple[str, ...]

    def what(self) -> str:
        return f"{self.function} holds parameters whole along the data axes ({quote_names(self.axes)})."

    def places(self) -> Sequence[str]:
        return [f"params{path} with {spec}" for path, spec in self.leaves]

    def fix(self) -> str:
        return (
            "shard parameters over data axes in a TrainStep with transform='shard_map', or in sync_gradients "
            "and value_and_grad; here replicate them: specs=jax.sharding.PartitionSpec()."
        )


@error
class ReplicaMismatchError(JaxsyncError, ValueError):
    """Replicas of one array that hold different values. `leaves`: path in `tree`, and the two devices."""

    leaves: tuple[tuple[str, str, str], ...]
    tree: str = "params"

    def what(self) -> str:
        return f"The replicas of {format_count(len(self.leaves), 'array', 'arrays')} hold different values."

    def places(self) -> Sequence[str]:
        return [f"{self.tree}{path}: {first} and {second} differ" for path, first, second in self.leaves]

    def fix(self) -> str:
        return (
            "start every device from the same values: build the array from one host copy with "
            "jax.device_put(value, NamedSharding(mesh, spec))."
        )


@error
class TreeMismatchError(JaxsyncError, ValueError):
    """Gradients or parameters that do not fit the plan. `problems`: one line a leaf."""

    problems: tuple[str, ...]

    def what(self) -> str:
        return f"{format_count(len(self.problems), 'leaf does', 'leaves do')} not fit the plan."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "pass the tree the plan was made for, with its shapes and dtypes; make a new plan when the "
            "parameters change."
        )
