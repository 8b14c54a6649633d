"""Every exception jaxsync raises.

    JaxsyncError
    ├── ConfigError            (ValueError)           a configuration that cannot be meant
    ├── ArgumentError          (TypeError)            an argument of another kind or value
    ├── MissingExtraError      (ImportError)          an optional dependency is not installed
    ├── BackendStartedError    (RuntimeError)         devices asked for after JAX had made its own
    ├── DeviceCountError       (RuntimeError)         fewer devices than the mesh needs
    ├── MeshError              (ValueError)           an axis the mesh does not have, or has in another size
    ├── RegistrationError      (ValueError)           a leaf that is no array
    ├── SpecError              (ValueError)           a PartitionSpec that does not fit its leaf or the mesh
    ├── DataShardedError       (ValueError)           a parameter that must be whole, and is sharded
    ├── ReplicaMismatchError   (ValueError)           replicas of one array that hold different values
    ├── TreeMismatchError      (ValueError)           gradients that do not fit the plan
    ├── UnboundAxisError       (NameError)            a collective outside shard_map and pmap
    ├── AlreadyReducedError    (ValueError)           gradients that were summed before
    ├── NotReducedError        (ValueError)           gradients that should have been summed before
    ├── UncheckedModelError    (ValueError)           model parallelism that JAX cannot check
    ├── LossError              (ValueError)           a loss function that returns something else
    ├── NotElementwiseError    (ValueError)           an optimizer that cannot work on parts of arrays
    ├── DeletedArrayError      (RuntimeError)         an array whose buffer was donated before
    ├── AliasedArrayError      (ValueError)           one array at two places of a donated tree
    ├── BatchError             (ValueError)           a batch that cannot be divided
    ├── DispatchError          (ValueError)           a dispatch window that cannot work
    ├── ClosedError            (RuntimeError)         a client that is closed, or was never started
    ├── StartConflictError     (RuntimeError)         a second start with another mesh or config
    ├── NotRegisteredError     (RuntimeError)         a sync before any parameters were registered
    ├── UnknownNameError       (LookupError)          a device, leaf or step that does not exist
    ├── DuplicateError         (ValueError)           the same registration or gradient twice
    ├── SubmissionError        (ValueError)           a gradient of another shape, dtype or device
    ├── TracedSubmissionError  (TypeError)            a host call inside a traced function
    ├── StepOverlapError       (RuntimeError)         a device that is two steps ahead
    ├── SetMismatchError       (ValueError)           devices that announce different leaves
    ├── MissingGradientError   (ValueError)           a sync without a gradient that was announced
    ├── SyncTimeoutError       (TimeoutError)         a sync that was not completed in time
    ├── TicketTimeoutError     (TimeoutError)         a wait that ended before the answer came
    ├── SyncFailedError        (RuntimeError)         a device or a launch broke; the cause is attached
    ├── CallbackError          (RuntimeError)         a deferred callback raised; the cause is attached
    ├── WrongThreadError       (RuntimeError)         a wait on the thread that would have to answer
    ├── ForkedProcessError     (RuntimeError)         a call in a forked child
    ├── InitializationError    (RuntimeError)         several processes that cannot be made one job
    ├── AbsentProcessError     (TimeoutError)         a process that did not come in time
    ├── PeerLostError          (ConnectionError)      a process that died or stopped while others needed it
    ├── DisagreementError      (ValueError)           processes that do not run the same job
    ├── ForeignDeviceError     (ValueError)           a device that another process owns
    ├── LaunchError            (OSError)              processes that cannot be started
    ├── CheckpointReadError    (OSError)              a checkpoint that is not there, or cannot be read
    ├── CheckpointWriteError   (OSError)              a checkpoint that cannot be written
    ├── CheckpointMismatchError (ValueError)          a checkpoint of other leaves
    ├── RunReadError           (OSError)              a run's files that are not there, or are damaged
    ├── RunWriteError          (OSError)              a run's files that cannot be written
    ├── ReportWriteError       (OSError)              a page or trace that cannot be written
    ├── SubjectError           (ValueError)           a function of the user's own that cannot be audited
    ├── GradientMismatchError  (AssertionError)       gradients that are not what one device computes
    ├── ReplicasDifferError    (AssertionError)       devices that hold different values
    ├── CollectiveCountError   (AssertionError)       a program with other collectives than expected
    ├── RecompiledError        (AssertionError)       a program compiled where none should be
    ├── LeakError              (AssertionError)       what a test left behind
    ├── MeshMarkError          (AssertionError)       a mark that asks for more devices than there are
    ├── TooFewDevicesError     (AssertionError)       a test on too few devices to show anything
    └── FaultMissedError       (AssertionError)       an injected fault that never struck

Each class owns its text: what happened, where (one line a place), and what to do. A raise gives only
the facts, as keyword fields, which stay readable on the exception and survive pickling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, dataclass_transform

from jaxsync.report.markup import Markup, element, fragment
from jaxsync.report.timeline import draw_timeline, make_spans

E = TypeVar("E", bound="JaxsyncError")

_MAX_PLACES = 8  # enough to see the pattern; a tree of 10,000 leaves must not flood a terminal


def _names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _rebuild(cls: type[JaxsyncError], facts: dict[str, Any]) -> JaxsyncError:
    return cls(**facts)


class JaxsyncError(Exception):
    """Base of all errors of jaxsync: what happened, where, what to do."""

    def what(self) -> str:
        """One sentence: what happened."""
        raise NotImplementedError

    def places(self) -> Sequence[str]:
        """One line for each place (leaf path, device, axis) that is at fault."""
        return ()

    def fix(self) -> str:
        """What the reader should do."""
        raise NotImplementedError

    def picture(self) -> str:
        """An SVG picture of what happened, or nothing."""
        return ""

    def __str__(self) -> str:
        places = list(self.places())
        lines = [self.what()]
        lines += [f"  - {place}" for place in places[:_MAX_PLACES]]
        if len(places) > _MAX_PLACES:
            lines.append(f"  - and {len(places) - _MAX_PLACES} more")
        lines.append(f"To fix it: {self.fix()}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.what()}>"

    def _repr_html_(self) -> str:
        places = [element("li", place) for place in self.places()[:_MAX_PLACES]]
        if (rest := len(self.places()) - _MAX_PLACES) > 0:
            places.append(element("li", f"and {rest} more"))
        what, _, table = self.fix().partition("\nThe last events:\n")
        parts = [
            element("p", f"{type(self).__name__}: {self.what()}"),
            *([element("ul", *places)] if places else []),
            element("p", f"To fix it: {what}"),
            *([element("p", "The last events:"), element("pre", table)] if table else []),
            Markup(self.picture()),
        ]
        return fragment(element("div", *parts, class_="bad"))

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception pickles as cls(*args); ours are made from keywords only.
        facts = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return _rebuild, (type(self), facts)


@dataclass_transform(kw_only_default=True, eq_default=False)
def _error(cls: type[E]) -> type[E]:
    # Not frozen: Python itself sets __traceback__ and __cause__ on exceptions.
    return dataclass(eq=False, kw_only=True, repr=False)(cls)


@_error
class ConfigError(JaxsyncError, ValueError):
    """A configuration that cannot be meant. `problems` has one line for each key at fault.

    `kind` says whether values are at fault, or the file that cannot be read, or its TOML; `folder` is where a
    relative path started.
    """

    source: str
    problems: tuple[str, ...]
    kind: Literal["values", "file", "toml"] = "values"
    folder: str = ""

    def what(self) -> str:
        return f"Not a valid configuration: {self.source}."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        if self.kind == "file":
            where = f"; {self.source} was looked for in the current folder, {self.folder}" * bool(self.folder)
            return f"give the path of a TOML file that is there and can be read{where}."
        if self.kind == "toml":
            return "correct the file at that place: it has to be TOML in UTF-8."
        return (
            "correct what is listed above. `jaxsync.SyncConfig` documents the keys of the sync table; "
            "configs/digits.toml in the repository of jaxsync shows all keys of a job."
        )


@_error
class ArgumentError(JaxsyncError, TypeError, ValueError):
    """An argument that is of another kind than it should be, or has a value that cannot be meant."""

    function: str
    argument: str
    got: str
    wanted: str

    def what(self) -> str:
        return f"{self.function} got {self.argument} = {self.got}; wanted {self.wanted}."

    def fix(self) -> str:
        return f"see help(jaxsync.{self.function}) for what each argument is, and their order."


@_error
class MissingExtraError(JaxsyncError, ImportError):
    """An optional dependency is not installed."""

    feature: str
    package: str
    extra: str

    def what(self) -> str:
        return f"{self.feature} needs the package {self.package!r}, which is not installed."

    def fix(self) -> str:
        return f"pip install 'jaxsync[{self.extra}]'"


@_error
class BackendStartedError(JaxsyncError, RuntimeError):
    """Simulated devices were asked for after JAX had already made its devices."""

    asked: int
    found: str
    causes: tuple[str, ...] = ()

    def what(self) -> str:
        return f"Cannot simulate {self.asked} CPU devices: {self.found}."

    def places(self) -> Sequence[str]:
        return self.causes

    def fix(self) -> str:
        return (
            "call jaxsync.simulate_devices(n) once, before anything makes an array or lists devices, and "
            "restart the process (in Jupyter: the kernel). JAX_DEBUG_LOG_MODULES=jax._src.xla_bridge shows "
            "when the backend starts."
        )


@_error
class DeviceCountError(JaxsyncError, RuntimeError):
    """Fewer devices than the mesh needs. `problem`: why JAX has none, if it cannot start."""

    asked: int
    found: int
    platform: str
    problem: str = ""
    causes: tuple[str, ...] = ()

    def what(self) -> str:
        found = (
            f"JAX cannot start: {self.problem}" if self.problem else f"JAX has {self.found} ({self.platform})"
        )
        return f"The mesh needs {_count(self.asked, 'device', 'devices')}; {found}."

    def places(self) -> Sequence[str]:
        return self.causes

    def fix(self) -> str:
        if self.problem:
            return (
                "choose a platform that is there, before the first use of JAX; an accelerator needs JAX's "
                "plugin for it. For simulated devices: JAX_PLATFORMS=cpu, and "
                f"jaxsync.simulate_devices({self.asked})."
            )
        return (
            f"make a smaller mesh, or simulate the devices: jaxsync.simulate_devices({self.asked}) "
            "before the first use of JAX."
        )


@_error
class MeshError(JaxsyncError, ValueError):
    """An axis that the mesh does not have, or has in another size. `problems`: one line an axis."""

    mesh: str
    problems: tuple[str, ...]

    def what(self) -> str:
        return f"The mesh ({self.mesh}) does not fit."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "give the mesh named axes of one or more devices, make the plan for the mesh it runs on, and "
            "name the axes that carry the batch in SyncConfig(axis=...)."
        )


@_error
class RegistrationError(JaxsyncError, ValueError):
    """A leaf that is no array. `leaves`: path and type of each."""

    leaves: tuple[tuple[str, str], ...]

    def what(self) -> str:
        return (
            f"{_count(len(self.leaves), 'leaf', 'leaves')} of the parameter tree cannot be synced: no array."
        )

    def places(self) -> Sequence[str]:
        return [f"params{path} is a {kind}" for path, kind in self.leaves]

    def fix(self) -> str:
        return (
            "register arrays or jax.ShapeDtypeStructs only: wrap numbers in jnp.asarray, and take functions "
            "and strings out of the tree (equinox: eqx.filter(model, eqx.is_array))."
        )


@_error
class SpecError(JaxsyncError, ValueError):
    """A PartitionSpec that does not fit its leaf or the mesh. `leaves`: path, shape, spec, reason."""

    leaves: tuple[tuple[str, str, str, str], ...]

    def what(self) -> str:
        return f"{_count(len(self.leaves), 'partition spec does', 'partition specs do')} not fit."

    def places(self) -> Sequence[str]:
        return [f"params{path} {shape} with {spec}: {reason}" for path, shape, spec, reason in self.leaves]

    def fix(self) -> str:
        return (
            "give each leaf a PartitionSpec of at most its rank, whose axes are in the mesh, used once, and "
            "whose sizes divide the dims; `specs` may be a prefix of the parameter tree."
        )


@_error
class DataShardedError(JaxsyncError, ValueError):
    """Parameters sharded over a data axis where each device needs all. `leaves`: path and spec of each."""

    function: str
    leaves: tuple[tuple[str, str], ...]
    axes: tuple[str, ...]

    def what(self) -> str:
        return f"{self.function} holds parameters whole along the data axes ({_names(self.axes)})."

    def places(self) -> Sequence[str]:
        return [f"params{path} with {spec}" for path, spec in self.leaves]

    def fix(self) -> str:
        return (
            "shard parameters over data axes in a TrainStep with transform='shard_map', or in sync_gradients "
            "and value_and_grad; here replicate them: specs=jax.sharding.PartitionSpec()."
        )


@_error
class ReplicaMismatchError(JaxsyncError, ValueError):
    """Replicas of one array that hold different values. `leaves`: path and the two devices."""

    leaves: tuple[tuple[str, str, str], ...]

    def what(self) -> str:
        return f"The replicas of {_count(len(self.leaves), 'array', 'arrays')} hold different values."

    def places(self) -> Sequence[str]:
        return [f"params{path}: {first} and {second} differ" for path, first, second in self.leaves]

    def fix(self) -> str:
        return (
            "start every device from the same values: build the array from one host copy with "
            "jax.device_put(value, NamedSharding(mesh, spec))."
        )


@_error
class TreeMismatchError(JaxsyncError, ValueError):
    """Gradients or parameters that do not fit the plan. `problems`: one line a leaf."""

    problems: tuple[str, ...]

    def what(self) -> str:
        return f"{_count(len(self.problems), 'leaf does', 'leaves do')} not fit the plan."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "pass the tree the plan was made for, with its shapes and dtypes; make a new plan when the "
            "parameters change."
        )


@_error
class UnboundAxisError(JaxsyncError, NameError):
    """A collective was asked for where its mesh axis does not exist."""

    function: str
    axes: tuple[str, ...]

    def what(self) -> str:
        return f"{self.function} reduces over {_names(self.axes)}, which is not bound here."

    def fix(self) -> str:
        return (
            "call it inside jax.shard_map over the plan's mesh, or inside jax.pmap(axis_name=...). Under "
            "plain jit on a sharded batch, gradients are global already and need no sync."
        )


@_error
class AlreadyReducedError(JaxsyncError, ValueError):
    """Gradients that were summed over the data axis before. `leaves`: their paths."""

    leaves: tuple[str, ...]
    axes: tuple[str, ...]

    def what(self) -> str:
        return (
            f"{_count(len(self.leaves), 'gradient is', 'gradients are')} already reduced over "
            f"{_names(self.axes)}: to reduce again would multiply by the number of devices, silently."
        )

    def places(self) -> Sequence[str]:
        return [f"grads{path}" for path in self.leaves]

    def fix(self) -> str:
        return (
            "under shard_map(check_vma=True), jax.grad with respect to replicated parameters sums the "
            "gradients itself. Differentiate with jaxsync.value_and_grad(loss_fn, plan), which syncs too; "
            "or make the parameters varying before jax.grad: "
            f"jax.lax.pcast(params, {self.axes!r}, to='varying'). Sync once only."
        )


@_error
class NotReducedError(JaxsyncError, ValueError):
    """Gradients that still differ from device to device. `leaves`: their paths."""

    function: str
    leaves: tuple[str, ...]
    axes: tuple[str, ...]

    def what(self) -> str:
        return (
            f"{self.function} needs synced gradients; "
            f"{_count(len(self.leaves), 'gradient still varies', 'gradients still vary')} over "
            f"{_names(self.axes)}, so each device would get another norm."
        )

    def places(self) -> Sequence[str]:
        return [f"grads{path}" for path in self.leaves]

    def fix(self) -> str:
        return "sync first: jaxsync.sync_gradients(grads, plan), or put jaxsync.synchronize(plan) before it."


@_error
class UncheckedModelError(JaxsyncError, ValueError):
    """A loss that communicates over a model axis where JAX cannot check its gradient."""

    axes: tuple[str, ...]
    primitives: tuple[str, ...]

    def what(self) -> str:
        return (
            f"The loss communicates over {_names(self.axes)} ({', '.join(self.primitives)}) without "
            "check_vma: JAX would multiply gradients by the size of that axis."
        )

    def fix(self) -> str:
        return (
            "use jax.shard_map(..., check_vma=True), where gradients across a model axis are right; or "
            "wrap the communication in jax.custom_vjp with the backward rule you mean."
        )


@_error
class LossError(JaxsyncError, ValueError):
    """A loss function that returns something else than it should."""

    got: str
    wanted: str

    def what(self) -> str:
        return f"loss_fn returned {self.got}; wanted {self.wanted}."

    def fix(self) -> str:
        return (
            "return a real scalar, the mean over this device's rows. weighted=True: (loss, weight); "
            "has_aux=True: (loss, aux), or ((loss, weight), aux) with both."
        )


@_error
class NotElementwiseError(JaxsyncError, ValueError):
    """An optimizer that looks at several elements at once. `problems`: place, leaf path, operation."""

    problems: tuple[tuple[str, str, str], ...]

    def what(self) -> str:
        return "shard_optimizer cannot divide this optimizer: its results are not elementwise."

    def places(self) -> Sequence[str]:
        return [
            f"{place} of params{path}: {reason}" if path else f"{place}: {reason}"
            for place, path, reason in self.problems
        ]

    def fix(self) -> str:
        return (
            "use an elementwise optimizer (sgd, momentum, adam, adamw, lion, rmsprop, also with schedules, "
            "masks, inject_hyperparams and clipping by the global norm); or give this one to make_train_step "
            "as it is, with its state on every device."
        )


@_error
class DeletedArrayError(JaxsyncError, RuntimeError):
    """An array whose buffer was donated to an earlier call. `leaves`: where it was passed."""

    leaves: tuple[str, ...]

    def what(self) -> str:
        return f"{_count(len(self.leaves), 'argument is an array', 'arguments are arrays')} deleted before."

    def places(self) -> Sequence[str]:
        return self.leaves

    def fix(self) -> str:
        return (
            "a function that donates an argument reuses its memory: go on with what it returned, copy what "
            "must stay, or do not donate (make_train_step(..., donate=False))."
        )


@_error
class AliasedArrayError(JaxsyncError, ValueError):
    """One array at two places of a donated tree. `leaves`: each pair of places."""

    leaves: tuple[tuple[str, str], ...]

    def what(self) -> str:
        return "A donated state holds the same array more than once; its memory can be reused only once."

    def places(self) -> Sequence[str]:
        return [f"{first} is also {second}" for first, second in self.leaves]

    def fix(self) -> str:
        return "make the state with step.init(params), which copies; or copy one of each pair: jnp.copy(x)."


@_error
class BatchError(JaxsyncError, ValueError):
    """A batch that cannot be divided. `leaves`: path, shape, reason."""

    leaves: tuple[tuple[str, str, str], ...]
    divisor: int

    def what(self) -> str:
        return f"The batch cannot be divided into {self.divisor} equal parts (devices x accumulate)."

    def places(self) -> Sequence[str]:
        return [f"batch{path} {shape}: {reason}" for path, shape, reason in self.leaves]

    def fix(self) -> str:
        return (
            f"give every batch leaf the same number of rows, a multiple of {self.divisor}; to keep all "
            "rows, pad the last batch and give the padding weight 0 with weighted=True."
        )


@_error
class DispatchError(JaxsyncError, ValueError):
    """A dispatch window that cannot work."""

    asked: str
    limit: int

    def what(self) -> str:
        return f"max_in_flight={self.asked} is not between 1 and {self.limit} (on CPU)."

    def fix(self) -> str:
        return (
            f"leave it out (8 on CPU, no window on accelerators): more than {self.limit} un-awaited "
            "programs with collectives abort the process on CPU."
        )


@_error
class ClosedError(JaxsyncError, RuntimeError):
    """A client that is closed. `pending`: what was unanswered when it was closed."""

    function: str
    pending: tuple[str, ...] = ()

    def what(self) -> str:
        return f"{self.function}: the sync client is closed."

    def places(self) -> Sequence[str]:
        return self.pending

    def fix(self) -> str:
        return "make a new client: jaxsync.start(mesh, config), or `with jaxsync.SyncClient(mesh, config)`."


@_error
class StartConflictError(JaxsyncError, RuntimeError):
    """A second start with another mesh or config. `differences`: one line each."""

    differences: tuple[str, ...]

    def what(self) -> str:
        return "jaxsync.start was called before, and that client is still open, with other settings."

    def places(self) -> Sequence[str]:
        return self.differences

    def fix(self) -> str:
        return "close the first client before another start; or start with the same mesh and config."


@_error
class NotRegisteredError(JaxsyncError, RuntimeError):
    """A sync before any parameters were registered."""

    function: str

    def what(self) -> str:
        return f"{self.function} was called before any parameters were registered."

    def fix(self) -> str:
        return "call client.register_sync_parameters(params) first."


@_error
class UnknownNameError(JaxsyncError, LookupError):
    """A device, leaf or step that does not exist."""

    kind: str
    names: tuple[str, ...]
    known: tuple[str, ...]

    def what(self) -> str:
        return f"There is no such {self.kind}: {', '.join(self.names)}."

    def places(self) -> Sequence[str]:
        return [f"there is {name}" for name in self.known]

    def fix(self) -> str:
        return (
            "name a device of the client's mesh (itself or its index), and leaves of the registered tree by "
            "their path, as jax.tree_util.keystr writes it."
        )


@_error
class DuplicateError(JaxsyncError, ValueError):
    """The same registration or gradient twice. Only the caller is told; the first one counts."""

    function: str
    device: str
    step: int
    leaves: tuple[str, ...] = ()

    def what(self) -> str:
        return f"{self.function}: {self.device} did that before in step {self.step}."

    def places(self) -> Sequence[str]:
        return [f"grads{path}" for path in self.leaves]

    def fix(self) -> str:
        return (
            "hand over each gradient once a step: add up several backward passes before, and end a step "
            "with client.submit_sync_collective(device)."
        )


@_error
class SubmissionError(JaxsyncError, ValueError):
    """A gradient of another shape, dtype or device than registered. `problems`: one line a leaf."""

    device: str
    problems: tuple[str, ...]

    def what(self) -> str:
        return f"Gradients of {self.device} cannot be synced."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "hand over concrete arrays that live on that device alone, with the shape of its shard and the "
            "registered dtype: jax.device_put(grad, device)."
        )


@_error
class TracedSubmissionError(JaxsyncError, TypeError):
    """A host call inside a traced function, where it would run once and never again."""

    function: str

    def what(self) -> str:
        return f"{self.function} was called with traced values, inside jit, grad, shard_map or pmap."

    def fix(self) -> str:
        return (
            "inside a traced function use jaxsync.sync_gradients(grads, plan); call the client with the "
            "arrays the function returned."
        )


@_error
class StepOverlapError(JaxsyncError, RuntimeError):
    """A device that is two steps ahead of another."""

    device: str
    step: int

    def what(self) -> str:
        return f"{self.device} would start step {self.step + 2} while step {self.step} is incomplete."

    def fix(self) -> str:
        return "wait for the ticket of a step before the next but one: ticket.wait()."


@_error
class SetMismatchError(JaxsyncError, ValueError):
    """Devices that announce different leaves, shapes or dtypes. Nothing was launched."""

    step: int
    problems: tuple[str, ...]

    def what(self) -> str:
        return f"Step {self.step}: the devices do not announce the same leaves, so nothing was reduced."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "announce the same tree on every device; a leaf that one device does not use gets a gradient of "
            "zeros there."
        )


@_error
class MissingGradientError(JaxsyncError, ValueError):
    """A sync without a gradient that was announced."""

    step: int
    device: str
    leaves: tuple[str, ...]

    def what(self) -> str:
        number = _count(len(self.leaves), "gradient", "gradients")
        return f"Step {self.step}: {self.device} synced without {number}."

    def places(self) -> Sequence[str]:
        return [f"grads{path}" for path in self.leaves]

    def fix(self) -> str:
        return (
            "hand over every announced leaf before client.submit_sync_collective(device); or take unused "
            "ones for zero with SyncConfig(unused='zero')."
        )


@_error
class SyncTimeoutError(JaxsyncError, TimeoutError):
    """A sync that was not completed in time.

    `owed`: who owes what; `events`: the last that happened; `record`: all that are kept, as JSON.
    """

    step: int
    timeout_s: float
    owed: tuple[str, ...]
    events: str = ""
    record: str = ""

    def what(self) -> str:
        return f"Step {self.step} was not complete after {self.timeout_s:g} s."

    def places(self) -> Sequence[str]:
        return self.owed or ("every device has synced: a launched program did not finish",)

    def fix(self) -> str:
        text = (
            "see that every device reaches client.submit_sync_collective in every step; if one is only slow, "
            "raise SyncConfig(timeout_s=...)."
        )
        return f"{text}\nThe last events:\n{self.events}" if self.events else text

    def picture(self) -> str:
        return draw_timeline(make_spans(json.loads(self.record))) if self.record else ""


@_error
class TicketTimeoutError(JaxsyncError, TimeoutError):
    """A wait that ended before the answer came. The ticket is still good."""

    what_for: str
    timeout_s: float

    def what(self) -> str:
        return f"No answer to {self.what_for} within {self.timeout_s:g} s; the ticket is still pending."

    def fix(self) -> str:
        return "wait again, or longer; client.describe() says who and what is missing."


@_error
class SyncFailedError(JaxsyncError, RuntimeError):
    """A device or a launch broke; `__cause__` is the exception it broke with."""

    step: int
    devices: tuple[str, ...]
    reason: str

    def what(self) -> str:
        return f"Step {self.step} failed for all devices: {self.reason}."

    def places(self) -> Sequence[str]:
        return [f"it came from {device}" for device in self.devices]

    def fix(self) -> str:
        return "mend what the attached cause says, close the client, and start a new one."


@_error
class CallbackError(JaxsyncError, RuntimeError):
    """A deferred callback raised; `__cause__` is what it raised."""

    callbacks: tuple[str, ...]

    def what(self) -> str:
        return f"{_count(len(self.callbacks), 'deferred callback', 'deferred callbacks')} raised."

    def places(self) -> Sequence[str]:
        return self.callbacks

    def fix(self) -> str:
        return "mend the callback; its exception is attached as the cause."


@_error
class WrongThreadError(JaxsyncError, RuntimeError):
    """A wait on the thread that would have to answer."""

    function: str

    def what(self) -> str:
        return f"{self.function} on the loop's own thread, inside a callback, would never end."

    def fix(self) -> str:
        return (
            "let the callback only store or print, and do the rest on the thread that waits for its ticket."
        )


@_error
class ForkedProcessError(JaxsyncError, RuntimeError):
    """A call in a forked child, which has neither the loop's thread nor a usable JAX."""

    function: str

    def what(self) -> str:
        return f"{self.function} was called in a forked child of the process that started JAX."

    def fix(self) -> str:
        return "start children with multiprocessing.get_context('spawn'), and make the client there."


@_error
class InitializationError(JaxsyncError, RuntimeError):
    """`jaxsync.initialize` was called too late, twice, or with arguments that do not make a job."""

    reason: str
    problems: tuple[str, ...] = ()

    def what(self) -> str:
        return f"jaxsync.initialize: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "call jaxsync.initialize once, before anything makes an array or lists devices: with one "
            "coordinator_address (a free port on the machine of process 0) and num_processes for all, and a "
            "process_id of its own for each; or with none of them, under a launcher that sets them."
        )


@_error
class AbsentProcessError(JaxsyncError, TimeoutError):
    """A process that did not come in time. `missing`: the processes; `waited_for`: where they should be."""

    waited_for: str
    missing: tuple[int, ...]
    num_processes: int
    timeout_s: float

    def what(self) -> str:
        number = str(len(self.missing)) if self.missing else "Some"  # who came late sees all of them
        return (
            f"{number} of {self.num_processes} processes did not come to {self.waited_for} within "
            f"{self.timeout_s:g} s."
        )

    def places(self) -> Sequence[str]:
        return [f"process {process} is missing" for process in self.missing]

    def fix(self) -> str:
        is_start = self.waited_for.startswith("jaxsync.initialize")
        timeout = "timeout_s" if is_start else "collective_timeout_s"
        return (
            "see in their logs whether they were started, ended early or take another way through the "
            "program: all processes must run the same calls in the same order. If they are only slow, raise "
            f"the timeout: jaxsync.initialize({timeout}=...)."
        )


@_error
class PeerLostError(JaxsyncError, ConnectionError):
    """A process that died or stopped while others needed it; `__cause__` is what was seen of it."""

    seen: str
    processes: tuple[str, ...] = ()

    def what(self) -> str:
        return f"Another process is lost: {self.seen}."

    def places(self) -> Sequence[str]:
        return self.processes

    def fix(self) -> str:
        return (
            "find the process whose log ends first, and start all processes anew, from the last checkpoint. "
            "If one was only slow, raise the timeouts: jaxsync.initialize(collective_timeout_s=...)."
        )


@_error
class DisagreementError(JaxsyncError, ValueError):
    """Processes that do not run the same job. `differences`: one line each. Nothing was launched."""

    subject: str
    differences: tuple[str, ...]

    def what(self) -> str:
        return f"The processes do not agree on {self.subject}, so nothing was launched."

    def places(self) -> Sequence[str]:
        return self.differences

    def fix(self) -> str:
        return (
            "run the same program, with the same versions, configuration and order of devices, in every "
            "process. A batch of host arrays is the whole batch, the same in all of them; for a process that "
            "has only its own rows: jax.make_array_from_process_local_data(sharding, rows)."
        )


@_error
class ForeignDeviceError(JaxsyncError, ValueError):
    """A device that another process owns. `device`, `owner` and the caller's own process."""

    function: str
    device: str
    owner: int
    process: int

    def what(self) -> str:
        owner = f"belongs to process {self.owner}, and this is process {self.process}"
        return f"{self.function}: {self.device} {owner}."

    def fix(self) -> str:
        return (
            "let each process act for its own devices only: those of mesh.devices.flat whose process_index "
            "is jax.process_index()."
        )


@_error
class LaunchError(JaxsyncError, OSError):
    """Processes that cannot be started. Those that were started before have been ended.

    `kind` says whether the command is at fault, the run directory, or options, of which `problems` has a line
    for each.
    """

    command: tuple[str, ...] = ()
    process: int = 0
    reason: str = ""
    kind: Literal["command", "run_dir", "options"] = "command"
    run_dir: str = ""
    problems: tuple[str, ...] = ()

    def what(self) -> str:
        if self.kind == "run_dir":
            return f"No process was started: nothing can be recorded in {self.run_dir}: {self.reason}."
        if self.kind == "options":
            return "No process was started: options that cannot be meant."
        return f"Process {self.process} could not be started: {self.command[0]}: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        if self.kind == "run_dir":
            return "give --run-dir a directory that can be made and written to; or leave it out."
        if self.kind == "options":
            return (
                "correct what is listed above; `jaxsync launch --help` says what each option is: "
                "`jaxsync launch -n 4 -- python train.py`."
            )
        return (
            "give the program and its arguments after `--`, as a shell would find them from here: "
            "`jaxsync launch -n 4 -- python train.py`."
        )


@_error
class CheckpointReadError(JaxsyncError, OSError):
    """A checkpoint that is not there, or cannot be read. `found`: what is in the directory."""

    directory: str
    reason: str
    found: tuple[str, ...] = ()

    def what(self) -> str:
        return f"No checkpoint could be loaded from {self.directory}: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.found

    def fix(self) -> str:
        return (
            "give the directory that save_checkpoint wrote to, and a number that "
            "jaxsync.list_checkpoints(directory) has; if one cannot be read, load the one before it."
        )


@_error
class CheckpointWriteError(JaxsyncError, OSError):
    """A checkpoint that cannot be written. `found`: what is in the way."""

    directory: str
    reason: str
    found: tuple[str, ...] = ()

    def what(self) -> str:
        return f"No checkpoint could be saved in {self.directory}: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.found

    def fix(self) -> str:
        return (
            "give each run a directory of its own that can be written to and has room; to go back to an "
            "earlier step, go on in a new directory. The checkpoints that were there are as they were."
        )


@_error
class CheckpointMismatchError(JaxsyncError, ValueError):
    """A checkpoint whose leaves are not those of the step. `problems`: one line a leaf."""

    path: str
    saved_with: str
    loaded_with: str
    problems: tuple[str, ...]

    def what(self) -> str:
        number = _count(len(self.problems), "leaf does", "leaves do")
        return (
            f"{number} not fit: the checkpoint {self.path} (plan {self.saved_with[:16]}) is of another model "
            f"or optimizer than the step (plan {self.loaded_with[:16]})."
        )

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "load it with a step whose parameters and optimizer have these leaves; only devices, mesh, "
            "specs and config may differ from those it was saved with."
        )


@_error
class GradientMismatchError(JaxsyncError, AssertionError):
    """Gradients that are not what one device computes. `leaves`: path and finding of each."""

    leaves: tuple[tuple[str, str], ...]
    num_compared: int

    def what(self) -> str:
        verb = "differs" if len(self.leaves) == 1 else "differ"
        number = f"{len(self.leaves)} of {_count(self.num_compared, 'value', 'values')}"
        return f"{number} {verb} from what one device computes."

    def places(self) -> Sequence[str]:
        return [f"{path}: {finding}" for path, finding in self.leaves]

    def fix(self) -> str:
        return (
            "reduce every gradient once, over the axes that carry the batch and no other: "
            "jaxsync.value_and_grad(loss_fn, plan) does. A ratio that is a number of devices comes most "
            "often from jax.grad with respect to replicated parameters under jax.shard_map: it sums over the "
            "devices itself, and pmean of that sum changes nothing. There make the parameters varying before "
            "jax.grad: jax.lax.pcast(params, axis, to='varying'). See that loss_fn, on one "
            "device, is the loss of the whole batch; if all is right but the rounding, pass rtol=."
        )


@_error
class ReplicasDifferError(JaxsyncError, AssertionError):
    """Devices that should hold the same values, and do not. `leaves`: path and the two devices."""

    leaves: tuple[tuple[str, str, str], ...]

    def what(self) -> str:
        return f"The replicas of {_count(len(self.leaves), 'array', 'arrays')} hold different values."

    def places(self) -> Sequence[str]:
        return [f"tree{path}: {first} and {second} differ" for path, first, second in self.leaves]

    def fix(self) -> str:
        return (
            "reduce what devices add to, before it is returned with a replicated spec; keep check_vma=True, "
            "which refuses most of these; start every device from the same values, and decide (skip, clip, "
            "stop) by numbers that were reduced."
        )


@_error
class CollectiveCountError(JaxsyncError, AssertionError):
    """A program with other collectives than expected. `problems`: one line a kind; `table`: all it has."""

    problems: tuple[str, ...]
    table: str

    def what(self) -> str:
        return "The compiled program does not have the collectives it should have."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "reduce once a step, outside loops, by bucket (jaxsync.sync_gradients); or, if the program is "
            f"right, name every kind with its number.\nIts collectives:\n{self.table}"
        )


@_error
class RecompiledError(JaxsyncError, AssertionError):
    """Programs that were compiled where none should be. `functions`: the name of each, in order."""

    functions: tuple[str, ...]

    def what(self) -> str:
        number = _count(len(self.functions), "program was", "programs were")
        return f"{number} compiled inside no_recompile()."

    def places(self) -> Sequence[str]:
        counts = {name: self.functions.count(name) for name in self.functions}
        return [name if count == 1 else f"{name}, {count} times" for name, count in counts.items()]

    def fix(self) -> str:
        return (
            "call everything once before the block (operations outside jit compile too), and keep shapes, "
            "dtypes, weak types and shardings as they were; make functions and meshes once, not in the loop. "
            "jax.config.update('jax_explain_cache_misses', True) tells what was new."
        )


@_error
class LeakError(JaxsyncError, AssertionError):
    """What a test left behind. `leaks`: one line each."""

    leaks: tuple[str, ...]

    def what(self) -> str:
        return f"The test left {_count(len(self.leaks), 'thing', 'things')} behind."

    def places(self) -> Sequence[str]:
        return self.leaks

    def fix(self) -> str:
        return (
            "let every device sync, wait for its ticket, join each thread, and keep no array in a global. If "
            "something else keeps it rightly, leave that check out: jaxsync_leak_checks = threads tickets."
        )


@_error
class MeshMarkError(JaxsyncError, AssertionError):
    """A mesh mark that asks for more devices than there are."""

    mesh: str
    asked: int
    found: int
    platform: str

    def what(self) -> str:
        found = f"JAX has {self.found} ({self.platform})"
        return f"The mark mesh({self.mesh}) needs {self.asked} devices; {found}."

    def fix(self) -> str:
        return (
            f"run pytest --jaxsync-devices={self.asked}, or set jaxsync_devices = {self.asked} in pytest's "
            "configuration."
        )


@_error
class TooFewDevicesError(JaxsyncError, AssertionError):
    """A test on too few devices to show anything. `allow`: what lets it pass where that is meant."""

    subject: str
    found: int
    wanted: int
    allow: str

    def what(self) -> str:
        why = ", and one device shows nothing: no reduction can be wrong there" if self.found == 1 else ""
        found = _count(self.found, "device", "devices")
        return f"{self.subject} is on {found}; wanted {self.wanted} or more{why}."

    def fix(self) -> str:
        devices = max(self.wanted, 8)
        return (
            f"run pytest --jaxsync-devices={devices}, or set jaxsync_devices = {devices} in pytest's "
            f"configuration, and use all devices; or, if so few are meant, {self.allow}."
        )


@_error
class FaultMissedError(JaxsyncError, AssertionError):
    """Injected faults that never struck, so that nothing was tested. `faults`: one line each."""

    faults: tuple[str, ...]

    def what(self) -> str:
        return f"{_count(len(self.faults), 'injected fault', 'injected faults')} never struck."

    def places(self) -> Sequence[str]:
        return self.faults

    def fix(self) -> str:
        return (
            "use the client that inject_faults gives in place of the other, and count steps from 0 at the "
            "beginning of the block, for each device."
        )


@_error
class RunReadError(JaxsyncError, OSError):
    """The files of a run that are not there, or are damaged. `found`: what is in the directory."""

    directory: str
    reason: str
    found: tuple[str, ...] = ()

    def what(self) -> str:
        return f"No run could be read from {self.directory}: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.found

    def fix(self) -> str:
        return (
            "give the directory of a run: what `jaxsync train CONFIG --run-dir DIR` or "
            "jaxsync.run_log.RunLog wrote to. A line of steps.jsonl that is damaged can be deleted; run.json "
            "cannot be mended."
        )


@_error
class RunWriteError(JaxsyncError, OSError):
    """The files of a run that cannot be written."""

    directory: str
    reason: str

    def what(self) -> str:
        return f"The run cannot be written to {self.directory}: {self.reason}."

    def fix(self) -> str:
        return (
            "give each run a directory of its own that can be written to and has room (--run-dir DIR). To go "
            "on with the run that is there: `jaxsync train` with its --checkpoints DIR and --resume, or in a "
            "program of your own RunLog.open(directory, header, resume=True)."
        )


@_error
class ReportWriteError(JaxsyncError, OSError):
    """A page or trace that cannot be written."""

    file: str
    reason: str

    def what(self) -> str:
        return f"The report cannot be written to {self.file}: {self.reason}."

    def fix(self) -> str:
        return "name a file in a folder that exists and can be written to."


@_error
class SubjectError(JaxsyncError, ValueError):
    """A function of the user's own that cannot be audited."""

    reference: str
    problem: str

    def what(self) -> str:
        return f"{self.reference!r} cannot be audited: {self.problem}."

    def fix(self) -> str:
        return (
            "name a function as package.module:function. It takes no arguments and returns (fn, *args): a "
            "step and the arguments to compile it for. Its module is looked for in the current folder, and "
            "where Python looks (PYTHONPATH)."
        )
