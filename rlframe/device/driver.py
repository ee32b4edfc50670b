"""The driver of the topology `fused`: it calls the jitted rounds, and gives their results to the Learner.

`CallLength` chooses the number of rounds of a call. Before the driver allocates a replay, it checks that the device has
enough memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlframe import compilation
from rlframe.agents.base import Agent
from rlframe.agents.networks import has_images
from rlframe.device.replay import UnrollQueue
from rlframe.device.ring import StepRing
from rlframe.device.rounds import CallLimits, Carry, Rounds, Start, Tally, in_parts
from rlframe.envs.checks import no_legal_action_error
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.errors import UsageError
from rlframe.interprocess.heartbeat import COMPUTING
from rlframe.learners import Learner
from rlframe.replay.tree_store import available_memory
from rlframe.sharding import LearnerDevices
from rlframe.types import Logs, Params


def num_bytes(tree: Any) -> int:
    """Return the size of all arrays of a tree."""
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def check_memory(needed: int, how_to_shrink: str) -> None:
    """Raise UsageError if a replay needs more memory than the device has.

    Args:
        needed: highest number of bytes that the replay needs at once.
        how_to_shrink: a sentence for the error.
    """
    stats = jax.devices()[0].memory_stats() or {}  # a CPU has no statistics
    free = stats.get("bytes_limit", available_memory()) - stats.get("bytes_in_use", 0)
    if needed > free:
        raise UsageError(
            f"The replay needs {needed / 2**30:.1f} GiB of device memory, with its copy in a checkpoint, but only "
            f"{free / 2**30:.1f} GiB are free. {how_to_shrink}"
        )


_CALL_SECONDS = 0.5  # intended duration of a call: signals and progress wait for its end

MOST_PER_CALL = 2**30  # limit of all counts of one call, which are int32. The last round may pass it.

# Limit of the growth from one call to the next. The first calls are so short that they measure little but their fixed
# costs. With this limit, a call takes at most a few seconds if the next rounds are slower than those measured.
_MOST_GROWTH = 10.0


class CallLength:
    """The number K of rounds of the next call, or of steps in an evaluation.

    K is an argument of the jitted function, so one compilation is enough. The results do not depend on K.

    Rounds with updates can take a thousand times as long as the rounds before the first update. So the call in which a
    session makes its first update must end after `enough_updates`, and `choose` then starts again from K = 1.

    Attributes:
        count: K.
    """

    def __init__(self) -> None:
        self.count = 1  # the first call also compiles
        self._has_compiled = self._has_learned = False

    @property
    def enough_updates(self) -> int:
        """The number of updates after which the next call must end with its round. See `CallLimits`."""
        return MOST_PER_CALL if self._has_learned else 1

    def choose(self, count: int, seconds: float, updates: int = 0) -> None:
        """Choose K from the newest call: its number of rounds, its duration, and its number of updates."""
        is_first_to_learn = updates > 0 and not self._has_learned
        self._has_learned |= is_first_to_learn
        if not self._has_compiled:  # this call compiled, so its duration says nothing
            self._has_compiled = True
        elif is_first_to_learn:
            self.count = 1
        elif count:
            wanted = count * _CALL_SECONDS / max(seconds, 1e-6)
            # A call can end after a few of its rounds, so the limit of the growth is relative to K.
            self.count = int(min(max(1.0, wanted), _MOST_GROWTH * self.count, MOST_PER_CALL))


class CallResult(NamedTuple):
    """The results of a call for one run."""

    params: Params  # on the device, like `learner_state`; the next call of this run donates both
    learner_state: Any
    tally: Tally  # on the host
    logs: Logs  # of the newest update, on the host


class DeviceRun(Protocol):
    """The state of a run on the device, and the jitted calls that change it."""

    def run(self, env_steps: int, updates: int) -> CallResult:
        """Make rounds for about half a second, or until the given number of steps or updates is reached."""

    def get_state(self) -> list[np.ndarray]:
        """Return the state of the environments and of the replay, for a checkpoint."""

    def replay_stats(self) -> dict[str, int]:
        """Return the counters of the replay."""

    def close(self) -> None:
        """End the calls."""


class FusedDriver:
    """Makes rounds of steps and updates in jitted calls, with JAX environments. See `rlframe.programs.training.driver`.

    Args:
        agent: the agent.
        learner: the Learner, without a replay buffer. The driver closes it.
        device_run: the state on the device. The driver closes it.
        max_learner_steps: number of updates after which the session ends. None means no limit.
    """

    replay_is_small = True
    replay_is_saved = False  # it is part of `get_state`

    def __init__(
        self, agent: Agent, learner: Learner, device_run: DeviceRun, max_learner_steps: int | None = None
    ) -> None:
        self.spec, self.learner = agent.replay_spec, learner
        self._device_run, self._max_learner_steps = device_run, max_learner_steps
        extras = None if learner.restored is None else learner.restored.extras
        self.has_replay = extras is not None
        self._counts = {"env_steps": 0, "episodes": 0, "return_sum": 0.0, "length_sum": 0.0}
        if extras is not None:
            self._counts = dict(extras["counts"])

    @property
    def env_steps(self) -> int:
        """See `Driver`."""
        return int(self._counts["env_steps"])

    def advance(self, until: float, must_end: Callable[[], bool]) -> Logs | None:
        """See `Driver`. Make rounds for about half a second.

        This function does not call `must_end` between two updates: the call ends at `max_learner_steps`, and the caller
        checks the other limits after it.

        Raises:
            EnvError: the action mask of an environment allows no action.
        """
        env_steps, updates = until - self.env_steps, MOST_PER_CALL
        if self._max_learner_steps is not None:
            updates = self._max_learner_steps - self.learner.learner_steps
        with COMPUTING:
            params, learner_state, tally, logs = self._device_run.run(
                int(min(env_steps, MOST_PER_CALL)), min(updates, MOST_PER_CALL)
            )
        for name in self._counts:
            self._counts[name] += getattr(tally, name).item()
        if tally.blocked_env >= 0:
            raise no_legal_action_error(int(tally.blocked_env))
        self.learner.adopt(params, learner_state, logs, int(tally.updates), int(tally.failed_update))
        return logs if tally.updates else None

    def stats(self) -> dict[str, Any]:
        """See `Driver`."""
        return {"rank": 0, "incarnation": 0, **self._counts, "logged": {}}

    def replay_stats(self) -> dict[str, int]:
        """See `Driver`."""
        return self._device_run.replay_stats()

    def get_state(self, *, with_envs: bool) -> dict[str, Any]:
        """See `Driver`. The state contains the environments and the replay, so a resumed run continues exactly.

        The environments are saved even without `with_envs`, because a JAX environment cannot break.
        """
        return {"device": self._device_run.get_state(), "counts": self._counts}

    def free_envs(self) -> None:
        """See `Driver`. JAX environments have nothing to close."""

    def close(self) -> None:
        """See `Driver`."""
        self.learner.close()
        self._device_run.close()


class CompiledRounds:
    """The jitted functions of a run. They do not depend on the seed, so several runs can share them.

    Args:
        agent: the agent.
        envs: the environments.
        num_envs: number of environments.
        clip_rewards: see `Rounds`.
        devices: the devices that share the environments, the replay and the updates.

    Attributes:
        rounds: the rounds.
        in_parts: True if the parts of a round are jitted separately.
        run: `Rounds.run`. It donates the carry.
        init: `Rounds.init`.
    """

    def __init__(
        self, agent: Agent, envs: BatchedJaxEnv, num_envs: int, clip_rewards: float | None, devices: LearnerDevices
    ) -> None:
        spec = agent.replay_spec
        replay = UnrollQueue(spec, num_envs) if spec.kind == "queue" else StepRing(spec, num_envs)
        self.rounds = Rounds(agent, envs, replay, num_envs, clip_rewards)
        # On a CPU, the gradient of a convolution takes many times as long inside a loop (docs/project/speed.md).
        loops_slowly = has_images(agent.observation_spec) and jax.default_backend() == "cpu"
        self.in_parts = loops_slowly or not agent.jit_learner_step
        run = (
            in_parts(self.rounds, agent)
            if self.in_parts
            else compilation.jit(self.rounds.run, donate_argnums=(0,), differentiates=True)
        )
        self.run: Callable[[Carry, CallLimits], Carry] = devices.divided(run)
        self.init: Callable[..., Carry] = devices.divided(compilation.jit(self.rounds.init, differentiates=False))
        self._devices = devices

    def restore(self, start: Start, saved: list[np.ndarray]) -> Carry:
        """Return the carry with the leaves of a saved `state_of`, and otherwise like `init`. Empty `saved`.

        Do not allocate an empty replay, because a replay can need most of the memory.
        """
        structure = jax.tree.structure(state_of(jax.eval_shape(self.rounds.init, *start)))

        def others(*start: Any) -> dict[str, Any]:
            parts = self.rounds.init(*start)._asdict()
            return {name: part for name, part in parts.items() if name not in ("acting", "replay", "actor_params")}

        parts = compilation.jit(others, differentiates=False)(*start)
        saved.reverse()
        leaves = [_to_device(saved.pop()) for _ in range(len(saved))]
        acting, replay, actor_params = jax.tree.unflatten(structure, leaves)
        carry = Carry(acting=acting, replay=replay, actor_params=actor_params, **parts)
        if self._devices.mesh is None:
            return carry
        return self._devices.divided(compilation.jit(self.rounds.divide, differentiates=False))(carry)

    def check_memory(self, start: Start, *, runs: int = 1, restored: int = 0, joins: bool = False) -> None:
        """Raise UsageError if the replays of several runs do not fit into memory. They must not exist yet.

        Args:
            start: the start of one of the runs.
            runs: number of runs.
            restored: number of runs that have a checkpoint in the memory of the host.
            joins: True if one array contains the replays of all runs. Then `get_state` copies a replay on the device.
        """
        replays = runs + joins
        if jax.default_backend() == "cpu":
            # A checkpoint needs memory for one more replay. A restored checkpoint is freed after it was copied.
            replays = runs + 1 - restored
        needed = replays * num_bytes(self.rounds.replay_shapes(start))
        if jax.default_backend() != "cpu":  # each device has a part of the replay
            needed //= self._devices.count
        check_memory(needed, self.rounds.replay.how_to_shrink)


class SingleRun:
    """A run with its own calls. See `DeviceRun`.

    Args:
        compiled: the jitted functions.
        start: the start of the run.
        restored: a result of `get_state`, or None. This constructor empties the list.
    """

    def __init__(self, compiled: CompiledRounds, start: Start, restored: list[np.ndarray] | None) -> None:
        self._run, self._length = compiled.run, CallLength()
        self._carry = compiled.init(*start) if restored is None else compiled.restore(start, restored)

    def run(self, env_steps: int, updates: int) -> CallResult:
        """See `DeviceRun`."""
        began, length = time.perf_counter(), self._length
        limits = CallLimits(*np.array([length.count, env_steps, updates, length.enough_updates], np.int32))
        self._carry = carry = self._run(self._carry, limits)
        tally, logs = jax.device_get((carry.tally, carry.logs))
        length.choose(int(tally.rounds), time.perf_counter() - began, int(tally.updates))
        return CallResult(carry.params, carry.learner_state, tally, logs)

    def get_state(self) -> list[np.ndarray]:
        """See `DeviceRun`."""
        return jax.tree.map(np.asarray, jax.tree.leaves(state_of(self._carry)))

    def replay_stats(self) -> dict[str, int]:
        """See `DeviceRun`."""
        return {"items": int(self._carry.replay.size), "bytes": num_bytes(self._carry.replay)}

    def close(self) -> None:
        """See `DeviceRun`."""


def state_of(carry: Carry) -> tuple[Any, ...]:
    """Return the parts of a carry that a checkpoint contains. The Learner saves the parameters and its state."""
    return carry.acting, carry.replay, carry.actor_params


def with_state(carry: Carry, leaves: list[Any]) -> Carry:
    """Return the carry with the leaves of a saved `state_of`."""
    acting, replay, actor_params = jax.tree.unflatten(jax.tree.structure(state_of(carry)), leaves)
    return carry._replace(acting=acting, replay=replay, actor_params=actor_params)


def _to_device(array: np.ndarray) -> jax.Array:
    """Return a copy on the device. (`jnp.array` can make two copies.)"""
    copied = jax.device_put(array)
    is_same_memory = copied.unsafe_buffer_pointer() == array.ctypes.data  # possible on a CPU
    return jnp.copy(copied) if is_same_memory else copied
