"""A stepper holds the newest timestep, the recurrent state and the episode statistics of one environment pool.

A stepper returns a request for actions (`next_request`) and executes the actions (`act`). Between these calls, its
Actor waits for the inferencer or works on another pool. The two kinds of steppers wait for environments and add steps
in different methods:

               next_request                                       act
SyncStepper    returns the newest timestep immediately            steps the environments, and adds the step
AsyncStepper   waits for environments, and adds their steps       sends the actions
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.actors.pacing import UnrollGate
from rlframe.agents.trees import reset_where
from rlframe.envs.pool import stepping_phase, true_rewards
from rlframe.types import FIRST, LAST, AgentOutput, AgentState, Logs, Step, TimeStep, Tree

_FIRST_BYTE, _LAST_BYTE = bytes([FIRST]), bytes([LAST])


class InferenceRequest(NamedTuple):
    """The arguments of `inference`."""

    env_ids: np.ndarray  # [B] int64, global ids
    timestep: TimeStep  # [B, ...]
    state: AgentState  # [B, ...]


class PoolStepper:
    """Base class of the steppers of synchronous and asynchronous pools.

    Args:
        env: the environment pool.
        env_ids: [num_envs] int64, the global ids of its environments.
        replay_buffer: receives the steps.

    Attributes:
        has_request: True if `next_request` may be called and returns immediately.
        can_wait: True if `next_request` may be called and waits for environments.
        is_adding: True while a step is being added to the buffer. This takes long if the buffer is full.
        gate: the `UnrollGate` of an on-policy agent. None if the Actor never waits for newer parameters.
    """

    def __init__(self, env: Any, env_ids: np.ndarray, replay_buffer: Any) -> None:
        self.env, self.episodes = env, EpisodeStatistics(len(env_ids))
        self.is_adding = False
        self.gate: UnrollGate | None = None
        self._env_ids, self._replay_buffer = env_ids, replay_buffer
        self._stepping = stepping_phase(env)
        self._timestep: TimeStep | None = None  # newest timestep of a synchronous pool
        self._state: AgentState = None

    def begin(self, initial_state: AgentState) -> None:
        """Set the recurrent state at the start of an episode, [num_envs, ...]. Call this before the first request."""
        self._initial_state = initial_state
        self._is_recurrent = bool(jax.tree.leaves(initial_state))

    def get_state(self, with_envs: bool) -> dict[str, Any]:
        """See `Actor.get_state`. Environments of an asynchronous pool are never saved: they can be in a step."""
        env = self.env.get_state() if with_envs and self._timestep is not None else None
        timestep, state = (self._timestep, self._state) if env is not None else (None, None)
        return {"env": env, "timestep": timestep, "state": state, "episodes": self.episodes.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `get_state`. If it contains no environment states, the environments are reset."""
        resets = state["env"] is None
        self.episodes.set_state(state["episodes"], resets)
        if not resets:
            self.env.set_state(state["env"])
            self._timestep, self._state = state["timestep"], state["state"]

    def _add(self, env_ids: np.ndarray, step: Step) -> None:
        self.is_adding = True
        try:
            self._replay_buffer.add(env_ids, step)
        finally:
            self.is_adding = False


class SyncStepper(PoolStepper):
    """Steps a synchronous pool. Each request contains all environments."""

    can_wait = False
    _is_acted_on = False  # whether actions for the newest timestep were requested

    @property
    def has_request(self) -> bool:
        """False if a request for the newest timestep was already returned, or if the pool must wait for parameters."""
        return not self._is_acted_on and (self.gate is None or not self.gate.is_closed)

    def begin(self, initial_state: AgentState) -> None:
        """Reset the environments, unless `set_state` has restored them."""
        super().begin(initial_state)
        if self._timestep is None:
            with self._stepping:
                self._timestep, self._state = self.env.reset(), initial_state

    def next_request(self) -> InferenceRequest:
        """Return a request for the newest timestep. The caller must call `act` afterwards."""
        self._is_acted_on = True
        return self.newest_timestep()

    def newest_timestep(self) -> InferenceRequest:
        """Return the next request without starting a step. The caller need not call `act`."""
        assert self._timestep is not None
        return InferenceRequest(self._env_ids, self._timestep, self._state)

    def act(self, request: InferenceRequest, output: AgentOutput, next_state: AgentState) -> Logs | None:
        """Step the environments and add the step to the buffer. Return the logs of `Actor.step`."""
        if self.gate is not None:
            self.gate.count_step(output.params_version)
        with self._stepping:
            next_timestep = self.env.step(output.action)
        self._add(self._env_ids, Step(request.timestep, output, request.state, output.params_version, next_timestep))
        self._timestep = next_timestep
        if self._is_recurrent:
            self._state = reset_where(next_timestep.step_type == FIRST, next_state, self._initial_state)
        self._is_acted_on = False
        return self.episodes.update(next_timestep, rewards=true_rewards(self.env, next_timestep))


class AsyncStepper(PoolStepper):
    """Steps an asynchronous pool. Each request contains the environments that finish first."""

    has_request = False

    def __init__(self, env: Any, env_ids: np.ndarray, replay_buffer: Any) -> None:
        super().__init__(env, env_ids, replay_buffer)
        # The last request and output of each environment, kept until the environment has finished its step.
        # `_has_action` is True where a request exists. `_versions` are the parameter versions of the outputs.
        self._has_action = np.zeros(len(env_ids), bool)
        self._last_requests: tuple[TimeStep, AgentOutput, AgentState] | None = None
        self._versions = np.zeros(len(env_ids), np.int64)
        self._rewards = np.zeros(len(env_ids), np.float32)  # unclipped reward of each environment's newest timestep
        self._running = len(env_ids)  # number of environments that are resetting or stepping

    @property
    def can_wait(self) -> bool:
        """True if at least `wait_num` environments are running, so that a wait in `next_request` ends."""
        return self._running >= self.env.wait_num

    def begin(self, initial_state: AgentState) -> None:
        """Set the recurrent state at the start of an episode, [num_envs, ...]. Call this before the first request."""
        super().begin(initial_state)
        self._state = jax.tree.map(np.array, initial_state)

    def next_request(self) -> InferenceRequest:
        """Wait for environments. Add their completed steps to the buffer, and return a request for their timesteps."""
        with self._stepping:
            indices, timestep = self.env.recv()
        self._running -= len(indices)
        self._rewards[indices] = true_rewards(self.env, timestep)
        self._add_completed(indices, timestep)
        state = self._state
        if self._is_recurrent:
            initial, state = (jax.tree.map(lambda leaf: leaf[indices], tree) for tree in (self._initial_state, state))
            state = reset_where(timestep.step_type == FIRST, state, initial)
        return InferenceRequest(self._env_ids[indices], timestep, state)

    def act(self, request: InferenceRequest, output: AgentOutput, next_state: AgentState) -> Logs | None:
        """Send the actions. Return the logs of `Actor.step`."""
        indices = request.env_ids - self._env_ids[0]
        with self._stepping:
            self.env.send(indices, output.action)
        self._running += len(indices)
        last_requests = (request.timestep, output._replace(params_version=None), request.state)
        if self._last_requests is None:
            rows = len(self._env_ids)
            self._last_requests = jax.tree.map(
                lambda leaf: np.zeros((rows, *leaf.shape[1:]), leaf.dtype), last_requests
            )
        _write(self._last_requests, indices, last_requests)
        self._versions[indices], self._has_action[indices] = output.params_version, True
        if self._is_recurrent:
            _write(self._state, indices, next_state)
        return self.episodes.update(request.timestep, indices, self._rewards[indices])

    def _add_completed(self, indices: np.ndarray, timestep: TimeStep) -> None:
        """Add the steps that `timestep` completes. The first timestep of an environment completes no step."""
        has = self._has_action[indices]
        if not has.any():
            return
        if not has.all():
            indices, timestep = indices[has], jax.tree.map(lambda leaf: leaf[has], timestep)
        before, output, state = jax.tree.map(lambda leaf: leaf[indices], self._last_requests)
        self._add(self._env_ids[indices], Step(before, output, state, self._versions[indices], timestep))


class EpisodeStatistics:
    """Sums rewards per environment, and counts steps and episodes.

    Args:
        num_envs: number of environments in the pool.
    """

    def __init__(self, num_envs: int) -> None:
        self.env_steps = 0
        self.episodes = 0
        self.return_sum = self.length_sum = 0.0  # sums over the episodes that ended
        self._returns = np.zeros(num_envs, np.float64)
        # The length of an episode is its element of `_lengths` plus `_all_steps`. If all environments step, only the
        # int `_all_steps` changes, which is faster than a change of the array.
        self._lengths = np.zeros(num_envs, np.int64)
        self._all_steps = 0

    def update(
        self, timestep: TimeStep, indices: np.ndarray | None = None, rewards: np.ndarray | None = None
    ) -> Logs | None:
        """Update the counters and sums with timesteps that follow an action.

        Args:
            timestep: [B, ...]. FIRST is not counted as a step.
            indices: [B], the environments of the timesteps. None means all environments in order.
            rewards: [B], rewards to sum. None means the rewards of `timestep`.

        Returns:
            `episode_return` and `episode_length` (means) and `episodes` (a count) of the episodes that ended. None if
            none ended.
        """
        step_type = timestep.step_type
        types = step_type.tobytes()  # counting bytes is ten times as fast as comparing a small array
        began, ended = types.count(_FIRST_BYTE), types.count(_LAST_BYTE)
        self.env_steps += len(types) - began
        rewards = timestep.reward if rewards is None else rewards
        if indices is None:
            self._returns = self._returns + rewards  # faster than `+=` for one environment
            self._all_steps += 1
        else:
            self._returns[indices] += rewards
            self._lengths[indices] += 1
        if began:
            first = np.flatnonzero(step_type == FIRST)
            which = first if indices is None else indices[first]
            self._returns[which], self._lengths[which] = 0.0, -self._all_steps
        if not ended:
            return None
        self.episodes += ended
        last = step_type == LAST
        which = np.flatnonzero(last) if indices is None else indices[last]
        returns, lengths = float(self._returns[which].sum()), float((self._lengths[which] + self._all_steps).sum())
        self.return_sum += returns
        self.length_sum += lengths
        return {"episode_return": returns / ended, "episode_length": lengths / ended, "episodes": ended}

    def get_state(self) -> dict[str, Any]:
        """Return the counters and the running sums, as numpy arrays and ints."""
        return {
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "returns": self._returns.copy(),
            "lengths": self._lengths + self._all_steps,
        }

    def set_state(self, state: dict[str, Any], resets: bool) -> None:
        """Restore the result of `get_state`. If the environments reset, drop the sums of the current episodes."""
        self.env_steps, self.episodes = state["env_steps"], state["episodes"]
        if not resets:
            self._returns, self._lengths, self._all_steps = state["returns"].copy(), state["lengths"].copy(), 0


def merge_logs(some: Logs | None, more: Logs | None) -> Logs | None:
    """Merge the logs of two pools."""
    if some is None or more is None:
        return some if more is None else more
    episodes = some["episodes"] + more["episodes"]
    names = ("episode_return", "episode_length")
    means = {name: (some[name] * some["episodes"] + more[name] * more["episodes"]) / episodes for name in names}
    return {**means, "episodes": episodes}


def _write(rows: Tree, indices: np.ndarray, values: Tree) -> None:
    for row, value in zip(jax.tree.leaves(rows), jax.tree.leaves(values), strict=True):
        row[indices] = value
