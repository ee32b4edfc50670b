"""The Actor: a pool of environments, the recurrent state of each, and one step of them all."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import jax
import numpy as np

from rlframe.actors.episodes import EpisodeStatistics
from rlframe.envs import as_pool
from rlframe.types import FIRST, AgentOutput, AgentState, Logs, Step, TimeStep, Tree, global_env_ids


class Actor:
    """Steps its environments with an inferencer's actions and adds what happened to a replay buffer.

    Args:
        env_builder: an environment pool, one gymnasium or dm_env environment, or a callable that gives
            one of these; it gets `seed=`, drawn from (seed, rank, incarnation), where it takes that.
        inferencer: anything with `inference(env_ids, timestep, state)` and `initial_state(batch_size)`.
        replay_buffer: anything with `claim_rank`, `open_segment` and `add`.
        rank: which actor this is, from 0; None claims the next free rank of the buffer.
        seed: of the whole run.
    """

    def __init__(
        self, env_builder: Any, inferencer: Any, replay_buffer: Any, rank: int | None = None, *, seed: int = 0
    ) -> None:
        self._inferencer = inferencer
        self._replay_buffer = replay_buffer
        self.rank, self.incarnation = replay_buffer.claim_rank(rank=rank)
        self._env = build_pool(env_builder, env_seed(seed, self.rank, self.incarnation))
        num_envs = self._env.num_envs
        replay_buffer.open_segment(self.rank, num_envs)
        self._env_ids = global_env_ids(self.rank, np.arange(num_envs))
        self._episodes = EpisodeStatistics(num_envs)
        self._initial_state = inferencer.initial_state(num_envs)
        self._is_recurrent = bool(jax.tree.leaves(self._initial_state))
        self._state: AgentState = self._initial_state
        self._timestep: TimeStep | None = None
        self._pending = _Pending(num_envs)
        self._stop = threading.Event()

    @property
    def env_steps(self) -> int:
        """Steps that environments took; a step whose action was ignored (after LAST) is not one."""
        return self._episodes.env_steps

    @property
    def episodes(self) -> int:
        """Episodes that ended."""
        return self._episodes.episodes

    @property
    def num_envs(self) -> int:
        """Environments in the pool."""
        return self._env.num_envs

    def step(self) -> Logs | None:
        """One step of every environment (of those that are ready, if the pool is asynchronous).

        Returns:
            `episode_return`, `episode_length` (means) and `episodes` (how many) of the episodes that
            ended with this step; None if none did.

        Raises:
            EnvError: an environment raised, or its process died.
        """
        return self._step_sync() if self._env.is_sync else self._step_async()

    def run(self) -> None:
        """Steps until `stop()`: the Actor as a service."""
        while not self._stop.is_set():
            self.step()

    def stop(self) -> None:
        """Ends `run()` after the step under way. Any thread may call it."""
        self._stop.set()

    def close(self) -> None:
        """Stops, and closes the environments."""
        self.stop()
        self._env.close()

    def get_state(self, *, with_envs: bool = True) -> dict[str, Any]:
        """All that a resumed Actor needs: numpy, ints and bytes.

        `env` is None where the environments cannot save their state, or are not asked to because they
        have failed: a resumed Actor resets them.
        """
        with_envs = with_envs and self._env.is_sync and self._timestep is not None
        return {
            "env": self._env.get_state() if with_envs else None,
            "timestep": self._timestep,
            "state": self._state,
            "episodes": self._episodes.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what `get_state` gave; call it before the first `step`."""
        resets = state["env"] is None
        self._episodes.set_state(state["episodes"], resets)
        if not resets:
            self._env.set_state(state["env"])
            self._timestep, self._state = state["timestep"], state["state"]

    def _step_sync(self) -> Logs | None:
        if self._timestep is None:
            self._timestep = self._env.reset()
        timestep, state = self._timestep, self._state
        output, next_state = self._inferencer.inference(self._env_ids, timestep, state)
        next_timestep = self._env.step(output.action)
        self._replay_buffer.add(self._env_ids, Step(timestep, output, state, output.params_version, next_timestep))
        self._timestep = next_timestep
        if self._is_recurrent:
            self._state = zero_at_first(next_timestep, next_state, self._initial_state)
        return self._episodes.update(next_timestep)

    def _step_async(self) -> Logs | None:
        indices, timestep = self._env.recv()
        self._pending.add_to(self._replay_buffer, self._env_ids, indices, timestep)
        state = self._state
        if self._is_recurrent:
            initial, state = (jax.tree.map(lambda leaf: leaf[indices], tree) for tree in (self._initial_state, state))
            state = zero_at_first(timestep, state, initial)
        output, next_state = self._inferencer.inference(self._env_ids[indices], timestep, state)
        self._env.send(indices, output.action)
        self._pending.keep(indices, timestep, output, state)
        if self._is_recurrent:
            _write(self._state_rows(), indices, next_state)
        return self._episodes.update(timestep, indices)

    def _state_rows(self) -> AgentState:
        if self._state is self._initial_state:
            self._state = jax.tree.map(np.array, self._initial_state)
        return self._state


class _Pending:
    """What each environment of an asynchronous pool was last asked, until its answer comes."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._has = np.zeros(num_envs, bool)
        self._rows: tuple[TimeStep, AgentOutput, AgentState] | None = None
        self._versions = np.zeros(num_envs, np.int64)

    def keep(self, indices: np.ndarray, timestep: TimeStep, output: AgentOutput, state: AgentState) -> None:
        asked = (timestep, output._replace(params_version=None), state)
        if self._rows is None:
            self._rows = jax.tree.map(lambda leaf: np.zeros((self._num_envs, *leaf.shape[1:]), leaf.dtype), asked)
        _write(self._rows, indices, asked)
        self._versions[indices] = output.params_version
        self._has[indices] = True

    def add_to(self, replay_buffer: Any, env_ids: np.ndarray, indices: np.ndarray, timestep: TimeStep) -> None:
        has = self._has[indices]
        if not has.any():
            return
        if not has.all():
            indices, timestep = indices[has], jax.tree.map(lambda leaf: leaf[has], timestep)
        before, output, state = jax.tree.map(lambda leaf: leaf[indices], self._rows)
        step = Step(before, output, state, self._versions[indices], timestep)
        replay_buffer.add(env_ids[indices], step)


def build_pool(env_builder: Any, seed: int) -> Any:
    """The environment pool that `env_builder` is or gives; see `Actor`."""
    if not callable(env_builder):
        return as_pool(env_builder)
    takes_seed = "seed" in inspect.signature(env_builder).parameters
    return as_pool(env_builder(seed=seed) if takes_seed else env_builder())


def env_seed(*parts: int) -> int:
    """A seed below 2^31 for a pool of environments, from (seed, rank, incarnation)."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)


def _write(rows: Tree, indices: np.ndarray, values: Tree) -> None:
    for row, value in zip(jax.tree.leaves(rows), jax.tree.leaves(values), strict=True):
        row[indices] = value


def zero_at_first(timestep: TimeStep, state: AgentState, initial: AgentState) -> AgentState:
    """`state` with the rows that are at FIRST taken from `initial`; trees of [B, ...]."""
    first = timestep.step_type == FIRST
    if not first.any():
        return state

    def choose(new: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        return np.where(first.reshape((-1,) + (1,) * (new.ndim - 1)), fresh, new)

    return jax.tree.map(choose, state, initial)
