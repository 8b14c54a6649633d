"""What single devices hand over: which device it is, which leaves of the plan, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxsync.errors import ForeignDeviceError, RegistrationError, SubmissionError, UnknownNameError
from jaxsync.mismatch import leaf_problems
from jaxsync.multiprocess.agreement import mesh_processes
from jaxsync.params import Leaf
from jaxsync.placement import local_devices
from jaxsync.plan import SyncPlan

Device: TypeAlias = "int | jax.Device"
_DEVICE_KINDS = (int, jax.Device)  # made once, since this is asked for every gradient


class Senders:
    """The devices of a mesh that this process acts for, by what callers name them. Immutable.

    Attributes:
        devices: Those devices, in mesh order.
        names: What they are called in errors.
        is_first: Whether this is the first process of the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.devices = tuple(local_devices(mesh))
        self.names = tuple(map(str, self.devices))
        self.is_first = jax.process_index() == mesh_processes(mesh)[0]
        # The device itself, or its index in the mesh -> its index here.
        places = {device: place for place, device in enumerate(mesh.devices.flat)}
        self._index_of: dict[Any, int] = {
            name: index for index, device in enumerate(self.devices) for name in (device, places[device])
        }

    def index(self, device: Device, function: str) -> int:
        """The index of a device among those of this process.

        Args:
            device: The device, or its index in the mesh.
            function: Who asks.

        Raises:
            ForeignDeviceError: Another process owns the device.
            UnknownNameError: There is no such device.
        """
        is_device = isinstance(device, _DEVICE_KINDS) and not isinstance(device, bool)
        if is_device and (index := self._index_of.get(device)) is not None:
            return index
        for place, known in enumerate(self._mesh.devices.flat):
            if is_device and device in (place, known):
                raise ForeignDeviceError(
                    function=function,
                    device=str(known),
                    owner=known.process_index,
                    process=jax.process_index(),
                )
        raise UnknownNameError(kind="device", names=(str(device),), known=self.names)


class Intake:
    """Looks at trees that devices of a mesh announce and hand over. Immutable.

    Args:
        plan: The plan of the registered parameters.
        devices: The devices of its mesh.
    """

    def __init__(self, plan: SyncPlan, devices: Sequence[jax.Device]) -> None:
        self._plan = plan
        self._devices = tuple(devices)
        self._index_of = {leaf.path: index for index, leaf in enumerate(plan.leaves)}
        # A leaf that is not synced may have a dtype that NumPy does not know, such as that of a key.
        self._dtype_of = [jnp.dtype(leaf.dtype) if leaf.is_synced else None for leaf in plan.leaves]
        # What the gradients of a whole tree look like, to be compared as lists.
        self._synced = tuple(index for index, leaf in enumerate(plan.leaves) if leaf.is_synced)
        self._shapes = [plan.leaves[index].local_shape for index in self._synced]
        self._dtypes = [self._dtype_of[index] for index in self._synced]
        self._shardings = tuple(SingleDeviceSharding(device) for device in devices)

    def announced(self, params: Any) -> tuple[int, list[str]]:
        """The leaves of a tree, as a mask, and what is wrong with it."""
        mask, problems = 0, []
        for path, value in with_paths(params):
            index = self._index_of.get(path)
            if index is None:
                problems.append(f"{path} is not registered")
            elif (entry := self._plan.leaves[index]).is_synced:
                mask |= 1 << index
                problems += [
                    f"{path} {problem}" for problem in leaf_problems(value, entry.shape, entry.dtype)
                ]
        return mask, problems

    def gradients(self, device: int, name_or_tree: Any, grad: Any) -> dict[int, jax.Array]:
        """The gradients of some leaves by plan index, each fit for this device.

        Args:
            device: The index of the device.
            name_or_tree: As for `SyncClient.submit_gradient_sync`.
            grad: Likewise.

        Raises:
            SubmissionError: A gradient has another shape or dtype, lives elsewhere, or is deleted.
            UnknownNameError: There is no such leaf.
        """
        prefix, tree = (name_or_tree, grad) if isinstance(name_or_tree, str) else ("", name_or_tree)
        if prefix and (leaf := self._index_of.get(prefix)) is not None and self._fits(tree, leaf, device):
            return {leaf: tree}
        flat, treedef = jax.tree.flatten(tree)
        if not prefix and treedef == self._plan.treedef:
            indices, values = self._synced, [flat[index] for index in self._synced]
            if flat and self._is_whole(values, device):
                return dict(zip(indices, values, strict=True))
        else:
            located = self._locate(prefix, tree)
            indices, values = tuple(located), list(located.values())
        found: dict[int, jax.Array] = {}
        problems = []
        for index, value in zip(indices, values, strict=True):
            entry = self._plan.leaves[index]
            if not self._fits(value, index, device):
                value, wrong = _mend(value, entry, self._devices[device])
                problems += [f"grads{entry.path} {problem}" for problem in wrong]
            found[index] = value
        if not flat:
            problems = [f"grads{prefix} holds no gradient"]
        if problems:
            raise SubmissionError(device=str(self._devices[device]), problems=tuple(problems))
        return found

    def _is_whole(self, values: list[Any], device: int) -> bool:
        """Whether these are right in all respects as the gradients of all leaves: the quick look.

        Nearly all trees pass it. List by list, which takes half the time of gradient by gradient.
        """
        try:
            return (
                [value.shape for value in values] == self._shapes
                and [value.dtype for value in values] == self._dtypes
                and [value.sharding for value in values] == [self._shardings[device]] * len(values)
                and not any([value.is_deleted() for value in values])  # noqa: C419  # a generator takes twice it
            )
        except AttributeError:  # no array, or NumPy's
            return False

    def _fits(self, value: Any, index: int, device: int) -> bool:
        """Whether this is right in all respects as the gradient of a leaf that is synced."""
        if (dtype := self._dtype_of[index]) is None:
            return False
        try:
            is_alike = value.shape == self._plan.leaves[index].local_shape and value.dtype == dtype
            return bool(is_alike and value.sharding == self._shardings[device] and not value.is_deleted())
        except AttributeError:
            return False

    def _locate(self, prefix: str, tree: Any) -> dict[int, Any]:
        """The synced leaves of a part of the tree by plan index."""
        given = with_paths(tree, prefix)
        unknown = tuple(path for path, _ in given if path not in self._index_of)
        if not given and not any(path.startswith(prefix) for path in self._index_of):
            unknown = (prefix,)
        if unknown:
            raise UnknownNameError(kind="leaf", names=unknown, known=tuple(self._index_of))
        located = {self._index_of[path]: value for path, value in given}
        return {index: value for index, value in located.items() if self._plan.leaves[index].is_synced}


def with_paths(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, as `jax.tree_util.keystr` writes them behind `prefix`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(prefix + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def shapes(params: Any) -> Any:
    """The tree with the shape and dtype of each leaf.

    Raises:
        RegistrationError: Names each leaf that is no array.
    """
    wrong = [(path, type(x).__name__) for path, x in with_paths(params) if not hasattr(x, "shape")]
    if wrong:
        raise RegistrationError(leaves=tuple(wrong))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def _mend(value: Any, entry: Leaf, place: jax.Device) -> tuple[Any, list[str]]:
    """A gradient that is not right in all respects as one that is, or what is wrong with it."""
    wrong = leaf_problems(value, entry.local_shape, entry.dtype)
    if not wrong and isinstance(value, np.ndarray | np.generic):
        # A copy, since device_put may share the memory, and the caller may write there.
        return jax.device_put(np.array(value), place), []
    return value, wrong or _misplaced(value, place)


def _misplaced(value: Any, place: jax.Device) -> list[str]:
    if not isinstance(value, jax.Array):
        return [f"is a {type(value).__name__}, no array"]
    if value.is_deleted():
        return ["was deleted or donated"]
    if value.devices() != {place}:
        return [f"lives on {', '.join(sorted(map(str, value.devices())))}, not on {place}"]
    return []
