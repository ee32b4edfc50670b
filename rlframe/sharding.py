"""Divide the updates of a learner between several devices of its process.

Each device has all parameters and an equal part of the batch. XLA divides the computation, and adds the gradients of
the devices. The results equal those of one device, up to rounding.

    devices = LearnerDevices(4)
    params = devices.put_state(params)        # a copy on each of the four devices
    batch = devices.put_rows(batch)           # a quarter of the items on each device
    with devices.dividing():                  # while JAX traces the update
        update(params, batch)                 # calls `divide_rows` for each minibatch

If the number of rows is not a multiple of the number of devices, each device has all rows: the results are the same,
but nothing is gained. This happens, for example, after an actor has died.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlframe.errors import UsageError
from rlframe.types import Tree

_AXIS = "devices"  # name of the mesh's only axis

# The mesh of the update that is being traced in this thread. None means one device.
_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


class LearnerDevices:
    """The devices of a learner.

    Args:
        devices: number of devices, the first ones of this process, or the ids of devices.
        shard_params: divide large parameters and their optimizer state, too. Each device then has only a part of them,
            and gets the other parts when it needs them. A model that is too large for one device can learn.

    Attributes:
        count: number of devices.
        mesh: the devices as a mesh. None means JAX's default device.

    Raises:
        UsageError: this process does not have these devices.
    """

    def __init__(self, devices: int | tuple[int, ...] = 1, *, shard_params: bool = False) -> None:
        ids = tuple(range(devices)) if isinstance(devices, int) else devices
        owner = "The learner (learner_devices or learner_device_ids)"
        if not ids or min(ids) < 0 or len({*ids}) < len(ids):
            raise UsageError(f"{owner} needs at least one device, and each id only once, got {devices!r}.")
        local_device(owner, max(ids))  # raises if there are too few
        chosen = [local_device(owner, each) for each in ids]
        self.count, self._shard_params = len(ids), shard_params
        self.mesh: Mesh | None = None
        if ids != (0,):
            self.mesh = jax.make_mesh((len(ids),), (_AXIS,), devices=chosen, axis_types=(AxisType.Auto,))
        self._reads_in_place = self.mesh is None and chosen[0].platform == "cpu"

    @contextlib.contextmanager
    def dividing(self) -> Iterator[None]:
        """Make `divide_rows` divide between these devices, in functions that this thread traces."""
        token = _mesh.set(self.mesh)
        try:
            yield
        finally:
            _mesh.reset(token)

    def divided(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, called with `dividing`."""

        def call(*args: Any) -> Any:
            with self.dividing():
                return function(*args)

        return function if self.mesh is None else call

    def put_rows(self, tree: Tree) -> Tree:
        """Start to copy rows `[B, ...]` to the devices. A CPU without other devices reads them where they are."""
        if self._reads_in_place:
            return tree
        mesh = self.mesh
        if mesh is None:
            return jax.device_put(tree)
        return jax.tree.map(lambda leaf: jax.device_put(leaf, _row_sharding(mesh, leaf)), tree)

    def put_state(self, tree: Tree) -> Tree:
        """Copy parameters and learner state to the devices. With one device, return `tree`."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self._state_sharding(leaf)), tree)

    def state_shapes(self, tree: Tree) -> Tree:
        """Add the sharding of `put_state` to a tree of `jax.ShapeDtypeStruct`."""
        if self.mesh is None:
            return tree
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._state_sharding(leaf)), tree
        )

    def row_shapes(self, tree: Tree) -> Tree:
        """Add the sharding of `put_rows` to a tree of `jax.ShapeDtypeStruct`."""
        mesh = self.mesh
        if mesh is None:
            return tree
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_row_sharding(mesh, leaf)), tree
        )

    def keep_state(self, tree: Tree) -> Tree:
        """Return parameters and learner state that stay where `put_state` has put them. For jitted functions."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, self._state_sharding(leaf)), tree)

    def _state_sharding(self, leaf: Any) -> NamedSharding:
        assert self.mesh is not None
        spec: list[str | None] = [None] * np.ndim(leaf)
        if self._shard_params:
            sizes = {size: axis for axis, size in reversed([*enumerate(np.shape(leaf))]) if size % self.count == 0}
            if sizes:
                spec[sizes[max(sizes)]] = _AXIS
        return NamedSharding(self.mesh, PartitionSpec(*spec))


def local_device(owner: str, number: int) -> jax.Device:
    """Return device `number` of this process. If there is none, raise UsageError, which names the `owner`."""
    devices = jax.local_devices()
    if number < len(devices):
        return devices[number]
    there = f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}"
    simulate = " For a test, XLA_FLAGS=--xla_force_host_platform_device_count=N simulates N devices on a CPU."
    raise UsageError(
        f"{owner} needs device {number} (the first one is 0), but this process has {there}. Choose other devices."
        f"{simulate if devices[0].platform == 'cpu' else ''}"
    )


def divide_rows(tree: Tree, axis: int = 0) -> Tree:
    """Divide rows `[B, ...]` between the devices of the learner. For jitted functions.

    Call it for rows that were shuffled or gathered, because XLA could otherwise compute all of them on each device.
    Outside of `LearnerDevices.dividing`, it returns `tree`.
    """
    mesh = _mesh.get()
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, _row_sharding(mesh, leaf, axis)), tree)


def keep_whole(tree: Tree) -> Tree:
    """Keep a copy of each array on each device of the learner. For jitted functions, like `divide_rows`."""
    mesh = _mesh.get()
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, whole), tree)


def one_copy(array: Any) -> Any:
    """Return the copy of an array on its first device. If no device has all of the array, return a numpy array."""
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1:
        return array
    return array.addressable_data(0) if array.is_fully_replicated else np.asarray(array)


@jax.jit
def copy_arrays(tree: Tree) -> Tree:
    """Return a copy of each array."""
    return jax.tree.map(jax.numpy.copy, tree)


def _row_sharding(mesh: Mesh, leaf: Any, axis: int = 0) -> NamedSharding:
    shape = np.shape(leaf)
    divides = len(shape) > axis and shape[axis] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, _AXIS) if divides else PartitionSpec())
