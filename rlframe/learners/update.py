"""One update of a learner: compute new parameters, pack them for actors, and check that all are finite.

`InitialState` has the arrays before the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe import compilation
from rlframe.agents.base import Agent
from rlframe.errors import NonFiniteLossError, UsageError
from rlframe.params.packing import PackedParams, Packing
from rlframe.sharding import LearnerDevices, copy_arrays, one_copy
from rlframe.types import Batch, Logs, Params, Tree


class LearnerArrays(NamedTuple):
    """The arrays that an update changes, or their shapes as `jax.ShapeDtypeStruct`."""

    params: Params
    learner_state: Any
    actor_arrays: list[Any]  # packed parameters for actors

    def packing(self, agent: Agent) -> Packing:
        """Return the layout of `actor_arrays`."""
        return Packing(jax.eval_shape(agent.actor_params, self.params, self.learner_state))


class UpdateResult(NamedTuple):
    """The results of an update."""

    params: Tree
    learner_state: Tree
    logs: Logs
    actor_arrays: list[jax.Array]  # packed parameters for actors; the previous ones if the new ones are not finite
    is_finite: jax.Array  # [] bool: True if the loss, the parameters and the new parameters for actors are finite


class UncheckedUpdate(NamedTuple):
    """An update that has not been checked for NaN and infinity yet: see `check_update`."""

    step: int  # number of the learner step
    logs: Logs
    keys: Any  # [B, 3], keys of the batch's items; () if they are unknown
    is_finite: Any  # [] bool: True if the loss and the parameters are finite


class LearnerUpdate:
    """The jitted update of an agent.

    Call it with (params, learner_state, batch, actor_arrays) to get an `UpdateResult`. It donates `params` and
    `learner_state`. `actor_arrays` are the packed parameters that actors already have.

    Actors never get parameters that are not finite: the jitted call returns `actor_arrays` unchanged in this case. A
    choice outside the jitted call would have to wait for the device, and actors would have to wait too.

    Args:
        agent: the `Agent` that learns.
        packing: layout of the packed parameters.
        devices: the devices that share the update.
    """

    def __init__(self, agent: Agent, packing: Packing, devices: LearnerDevices) -> None:
        self._agent, self._packing, self._devices = agent, packing, devices
        self.pack = jax.jit(self._pack)
        self._keep_finite = jax.jit(self._finite_or_old)
        self._jitted: compilation.jit | None = None
        if agent.jit_learner_step:
            self._jitted = compilation.jit(self._update, donate_argnums=(0, 1), differentiates=True)
        self._call = devices.divided(self._jitted or self._update)

    def __call__(self, params: Tree, learner_state: Tree, batch: Batch, actor_arrays: list[jax.Array]) -> UpdateResult:
        return self._call(params, learner_state, batch, actor_arrays)

    def put(self, batch: Batch) -> Batch:
        """Start to copy a batch to the devices, without the fields that the update does not use."""
        return self._devices.put_rows(batch._replace(keys=(), params_version=()))

    def for_actors(self, actor_arrays: list[jax.Array]) -> PackedParams:
        """Return packed parameters to publish. If several devices have them, use the copy of the first device."""
        if self._devices.mesh is not None:
            actor_arrays = [one_copy(array) for array in actor_arrays]
        return PackedParams(self._packing, actor_arrays)

    def compile_ahead(self, shapes: LearnerArrays, batch: Batch) -> None:
        """Compile the update in another thread. See `compilation.jit.compile_ahead`.

        Args:
            shapes: the shapes of the learner's arrays.
            batch: the shapes of a batch, from `batch_shapes`.
        """
        if self._jitted is not None:
            params, learner_state, actor_arrays = self._devices.state_shapes(shapes)
            with self._devices.dividing():
                self._jitted.compile_ahead(params, learner_state, self._devices.row_shapes(batch), actor_arrays)

    def _update(self, params: Tree, learner_state: Tree, batch: Batch, actor_arrays: list[jax.Array]) -> UpdateResult:
        params, learner_state, logs = self._agent.learner_step(params, learner_state, batch)
        check_are_numbers(logs)  # if this function is jitted, only once, while JAX traces it
        loss = logs.get("loss", 0.0)
        actor_arrays, is_finite = self._keep_finite(params, learner_state, actor_arrays, loss)
        kept = self._devices.keep_state((params, learner_state, actor_arrays))
        return UpdateResult(kept[0], kept[1], dict(logs), kept[2], is_finite)

    def _finite_or_old(
        self, params: Tree, learner_state: Tree, actor_arrays: list[jax.Array], loss: Any
    ) -> tuple[list[jax.Array], jax.Array]:
        for_actors = self._agent.actor_params(params, learner_state)
        packed = self._packing.pack_jax(for_actors)
        in_packed = {id(leaf) for leaf in jax.tree.leaves(for_actors)}
        others = [leaf for leaf in jax.tree.leaves(params) if id(leaf) not in in_packed]
        # Checking one long array compiles faster than checking each leaf.
        is_finite = are_finite((self._packing.floats(packed), others, loss))
        return [jnp.where(is_finite, new, old) for new, old in zip(packed, actor_arrays)], is_finite

    def _pack(self, params: Tree, learner_state: Tree) -> list[jax.Array]:
        # Copy the arrays, because actors can still read the packed parameters when the next update donates the arrays.
        packed = self._packing.pack_jax(self._agent.actor_params(params, learner_state))
        return self._devices.keep_state(copy_arrays(packed))


def are_finite(tree: Tree) -> jax.Array:
    """Return [] bool: True if every floating-point number in `tree` is finite."""
    leaves = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or True))


def as_numbers(logs: Logs) -> dict[str, float]:
    """Return the logs of an update as Python floats, fetched from the device."""
    return {name: float(np.asarray(value).reshape(())) for name, value in dict(logs).items()}


# --- checks that end the run with an error


def check_is_batch(*given: Any) -> None:
    """Raise UsageError unless the arguments of `Learner.step` are a single batch or None."""
    if len(given) == 1 and (given[0] is None or isinstance(given[0], Batch)):
        return
    names = ", ".join(type(each).__name__ for each in given)
    raise UsageError(
        f"Learner.step expects one argument, a Batch from replay_buffer.sample() or None; got ({names}). "
        "The Learner stores its parameters and state itself, so call learner.step(batch). The pure function with "
        "parameters and state is agent.learner_step(params, learner_state, batch)."
    )


def check_are_numbers(logs: Logs) -> None:
    """Raise UsageError if a value in an agent's logs is not a single number. `priorities` may have any shape."""
    for name, value in logs.items():
        if name == "priorities":
            continue
        array = value if hasattr(value, "dtype") else np.asarray(value)  # a device array is not fetched
        if array.size != 1 or array.dtype.kind not in "fiubV":  # V: bfloat16 and similar types
            raise UsageError(
                f"The agent's learner_step logs {name!r} as {array.dtype} of shape {array.shape}; a log is one number. "
                "Log the mean, or remove this log."
            )


def check_update(update: UncheckedUpdate, last_good: Callable[[], str]) -> None:
    """Raise NonFiniteLossError if an update has a loss or a new parameter that is not finite.

    Args:
        update: the update to check.
        last_good: returns a sentence with the path of the last checkpoint.
    """
    if update.is_finite:  # the only value that this check fetches from the device
        return
    loss = update.logs.get("loss", 0.0)
    if not math.isfinite(loss):
        wrong = f"The loss of learner step {update.step} is {float(loss)}"
    else:
        wrong = f"A parameter is NaN or infinite after learner step {update.step}"
    batch = ""
    if len(update.keys):
        key = tuple(int(part) for part in update.keys[0])
        batch = (
            f", on a batch of {len(update.keys)} items. The key of its first item (rank, incarnation, number) is {key}"
        )
    raise NonFiniteLossError(
        f"{wrong}{batch}. {last_good()} "
        "Look for NaN and very large numbers in its rewards (scores, advantages) and observations, or lower the "
        "learning rate."
    )


def check_params(params: Tree, step: int, last_good: Callable[[], str]) -> None:
    """Raise NonFiniteLossError for the first array of `params` that is not finite after learner step `step`."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not np.all(np.isfinite(leaf)):
            name = jax.tree_util.keystr(path)
            raise NonFiniteLossError(f"Parameter {name} is not finite after learner step {step}. {last_good()}")


class InitialState:
    """Makes the initial arrays of a learner.

    Args:
        agent: the `Agent` that learns.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._jitted = compilation.jit_once(self._begin)

    def shapes(self) -> LearnerArrays:
        """Return the shapes of the arrays. This traces the agent's functions, but computes nothing."""
        key = jax.eval_shape(jax.random.PRNGKey, 0)
        return self._jitted.eval_shape(jax.eval_shape(self._agent.initial_params, key), key)

    def make(self, seed: int, params: Params | None = None) -> LearnerArrays:
        """Return the arrays. No array occurs twice, because updates donate the arrays.

        Args:
            seed: seed of the parameters and of the random numbers in the learner state.
            params: parameters to start from, in place of random ones.
        """
        init_rng, learner_rng = jax.random.split(jax.random.PRNGKey(seed))
        return self._jitted(self._agent.initial_params(init_rng) if params is None else params, learner_rng)

    def _begin(self, params: Params, rng: jax.Array) -> LearnerArrays:
        learner_state = self._agent.seeded(self._agent.initial_learner_state(params), rng)
        for_actors = self._agent.actor_params(params, learner_state)
        # Copy, because the learner state can share arrays with the parameters, for example the initial target network.
        return copy_arrays(LearnerArrays(params, learner_state, Packing(for_actors).pack_jax(for_actors)))


def mean_version(versions: np.ndarray) -> float:
    """Return the mean of `versions` without -1, which marks an unknown version. Return NaN if all are unknown."""
    # `sum` and a division are several times as fast as `mean`.
    if versions.min() >= 0:
        return versions.sum() / len(versions)
    known = versions[versions >= 0]
    return known.sum() / len(known) if len(known) else np.nan
