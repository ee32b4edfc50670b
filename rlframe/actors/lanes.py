"""Lanes: a pool of environments with what it last answered and the recurrent state of each environment.

A lane asks for actions (`ask`) and carries them out (`act`). Between the two its Actor waits for the inferencer, or
works on another lane.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.actors.episodes import EpisodeStatistics
from rlframe.envs.pool import stepping, true_rewards
from rlframe.types import FIRST, AgentOutput, AgentState, Logs, Step, TimeStep, Tree


class Request(NamedTuple):
    """What a lane asks of an inferencer: the arguments of `inference`."""

    env_ids: np.ndarray  # [B] int64, global
    timestep: TimeStep  # [B, ...]
    state: AgentState  # [B, ...]


class SyncLane:
    """A synchronous pool: all of its environments are in every request.

    Args:
        env: the pool.
        env_ids: [num_envs] int64, the global ids of its environments.
        replay_buffer: where the steps go.
    """

    def __init__(self, env: Any, env_ids: np.ndarray, replay_buffer: Any) -> None:
        self.env, self.episodes = env, EpisodeStatistics(len(env_ids))
        self._env_ids, self._replay_buffer = env_ids, replay_buffer
        self._timestep: TimeStep | None = None
        self._state: AgentState = None
        self._is_asking = False
        self.is_adding = False  # to the buffer, which may have no room
        self._stepping = stepping(env)

    @property
    def can_ask(self) -> bool:
        """Whether `ask` would not wait for environments."""
        return not self._is_asking

    @property
    def can_wait(self) -> bool:
        """Whether `ask` would wait for environments, and some are under way."""
        return False

    def begin(self, initial_state: AgentState) -> None:
        """Takes the state at FIRST, [num_envs, ...]. Comes before the first request."""
        self._initial_state = initial_state
        self._is_recurrent = bool(jax.tree.leaves(initial_state))
        if self._timestep is None:
            with self._stepping:
                self._timestep, self._state = self.env.reset(), initial_state

    def ask(self) -> Request:
        """The timestep that came last, to be acted on."""
        self._is_asking = True
        return self.request()

    def request(self) -> Request:
        """What `ask` gives, without asking."""
        assert self._timestep is not None
        return Request(self._env_ids, self._timestep, self._state)

    def act(self, request: Request, output: AgentOutput, next_state: AgentState) -> Logs | None:
        """Steps the environments, and adds the step to the buffer. Logs are those of `Actor.step`."""
        with self._stepping:
            next_timestep = self.env.step(output.action)
        step = Step(request.timestep, output, request.state, output.params_version, next_timestep)
        self.is_adding = True
        self._replay_buffer.add(self._env_ids, step)
        self.is_adding = False
        self._timestep = next_timestep
        if self._is_recurrent:
            self._state = zero_at_first(next_timestep, next_state, self._initial_state)
        self._is_asking = False
        return self.episodes.update(next_timestep, rewards=true_rewards(self.env, next_timestep))

    def get_state(self, with_envs: bool) -> dict[str, Any]:
        """See `Actor.get_state`."""
        env = self.env.get_state() if with_envs and self._timestep is not None else None
        return {"env": env, "timestep": self._timestep, "state": self._state, "episodes": self.episodes.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what `get_state` gave."""
        resets = state["env"] is None
        self.episodes.set_state(state["episodes"], resets)
        if not resets:
            self.env.set_state(state["env"])
            self._timestep, self._state = state["timestep"], state["state"]


class AsyncLane:
    """An asynchronous pool: a request is of the environments that answered first. Arguments as of `SyncLane`."""

    def __init__(self, env: Any, env_ids: np.ndarray, replay_buffer: Any) -> None:
        self.env, self.episodes = env, EpisodeStatistics(len(env_ids))
        self._env_ids, self._replay_buffer = env_ids, replay_buffer
        # What each environment was last asked, until its answer comes: which were, its trees, and the version.
        self._has_asked = np.zeros(len(env_ids), bool)
        self._asked: tuple[TimeStep, AgentOutput, AgentState] | None = None
        self._versions = np.zeros(len(env_ids), np.int64)
        self._rewards = np.zeros(len(env_ids), np.float32)  # the true ones of each environment's newest timestep
        self._running = len(env_ids)  # environments that have something to do
        self._state: AgentState = None
        self.is_adding = False  # to the buffer, which may have no room
        self._stepping = stepping(env)

    can_ask = False

    @property
    def can_wait(self) -> bool:
        """Whether enough environments are under way for `ask`, which waits for them."""
        return self._running >= self.env.wait_num

    def begin(self, initial_state: AgentState) -> None:
        """Takes the state at FIRST, [num_envs, ...]. Comes before the first request."""
        self._initial_state = initial_state
        self._is_recurrent = bool(jax.tree.leaves(initial_state))
        self._state = jax.tree.map(np.array, initial_state)

    def ask(self) -> Request:
        """Waits for environments, and adds the steps that they complete to the buffer."""
        with self._stepping:
            indices, timestep = self.env.recv()
        self._running -= len(indices)
        self._rewards[indices] = true_rewards(self.env, timestep)
        self._add_answered(indices, timestep)
        state = self._state
        if self._is_recurrent:
            initial, state = (jax.tree.map(lambda leaf: leaf[indices], tree) for tree in (self._initial_state, state))
            state = zero_at_first(timestep, state, initial)
        return Request(self._env_ids[indices], timestep, state)

    def act(self, request: Request, output: AgentOutput, next_state: AgentState) -> Logs | None:
        """Sends the actions. Logs are those of `Actor.step`."""
        indices = request.env_ids - self._env_ids[0]
        with self._stepping:
            self.env.send(indices, output.action)
        self._running += len(indices)
        asked = (request.timestep, output._replace(params_version=None), request.state)
        if self._asked is None:
            rows = len(self._env_ids)
            self._asked = jax.tree.map(lambda leaf: np.zeros((rows, *leaf.shape[1:]), leaf.dtype), asked)
        _write(self._asked, indices, asked)
        self._versions[indices], self._has_asked[indices] = output.params_version, True
        if self._is_recurrent:
            _write(self._state, indices, next_state)
        return self.episodes.update(request.timestep, indices, self._rewards[indices])

    def _add_answered(self, indices: np.ndarray, timestep: TimeStep) -> None:
        """Adds the steps that `timestep` completes: an environment's first answers no action."""
        has = self._has_asked[indices]
        if not has.any():
            return
        if not has.all():
            indices, timestep = indices[has], jax.tree.map(lambda leaf: leaf[has], timestep)
        before, output, state = jax.tree.map(lambda leaf: leaf[indices], self._asked)
        self.is_adding = True
        self._replay_buffer.add(self._env_ids[indices], Step(before, output, state, self._versions[indices], timestep))
        self.is_adding = False

    def get_state(self, with_envs: bool) -> dict[str, Any]:
        """See `Actor.get_state`: environments that are in the middle of a step cannot be saved."""
        del with_envs
        return {"env": None, "timestep": None, "state": None, "episodes": self.episodes.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what `get_state` gave: the environments are reset."""
        self.episodes.set_state(state["episodes"], True)


def make_lane(env: Any, env_ids: np.ndarray, replay_buffer: Any) -> SyncLane | AsyncLane:
    """The lane that suits the pool."""
    return (SyncLane if env.is_sync else AsyncLane)(env, env_ids, replay_buffer)


def zero_at_first(timestep: TimeStep, state: AgentState, initial: AgentState) -> AgentState:
    """`state` with the rows that are at FIRST taken from `initial`; trees of [B, ...]."""
    first = timestep.step_type == FIRST
    if not first.any():
        return state

    def choose(new: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        return np.where(first.reshape((-1,) + (1,) * (new.ndim - 1)), fresh, new)

    return jax.tree.map(choose, state, initial)


def _write(rows: Tree, indices: np.ndarray, values: Tree) -> None:
    for row, value in zip(jax.tree.leaves(rows), jax.tree.leaves(values), strict=True):
        row[indices] = value
