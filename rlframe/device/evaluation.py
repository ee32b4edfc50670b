"""Evaluations of JAX environments in jitted calls, with the rules of `rlframe.actors.Evaluator`."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe import compilation
from rlframe.actors.evaluator import EVALUATOR_RANK, PlayedEpisodes
from rlframe.agents.base import Agent
from rlframe.agents.trees import reset_where
from rlframe.device.driver import CallLength
from rlframe.envs.checks import FiniteCheck, MaskCheck
from rlframe.envs.jax_env import BatchedJaxEnv, EnvCarry
from rlframe.errors import StoppedError
from rlframe.interprocess.heartbeat import COMPUTING
from rlframe.learners.update import are_finite
from rlframe.params.reader import ParamSource
from rlframe.types import FIRST, LAST, AgentState, Logs, Params, TimeStep, call_number

_MOST_STEPS = 1024  # limit of the steps of one call


class _Playing(NamedTuple):
    """The state of an evaluation between two steps."""

    envs: EnvCarry
    timestep: TimeStep  # [N, ...], the newest timestep
    agent_state: AgentState  # [N, ...]
    rng: jax.Array  # a constant key
    call: jax.Array  # [] uint32: number of the next call of `eval_step`; with the key, it determines random numbers


class _PlayedSteps(NamedTuple):
    """The steps of one call. The host counts their episodes."""

    total: jax.Array  # [] int32: number of steps
    step_type: jax.Array  # [_MOST_STEPS, N] uint8; rows from `total` on are 0
    reward: jax.Array  # [_MOST_STEPS, N] float32


class EvaluationProgram:
    """The jitted function of evaluations. It does not depend on the seed, so several runs can share it.

    Args:
        agent: the agent.
        envs: the environments.
        check_finite: a call ends at a timestep with NaN or infinity, and `check` raises EnvError for it. The same
            applies, in any case, to a timestep with an action mask that allows no action.
    """

    def __init__(self, agent: Agent, envs: BatchedJaxEnv, check_finite: bool = True) -> None:
        self._agent, self._envs = agent, envs
        self._finite_check = FiniteCheck(agent.observation_spec) if check_finite else None
        self._mask_check = MaskCheck(agent.observation_spec)
        self.play = compilation.jit(self._play, differentiates=False)

    def begin(self, env_keys: np.ndarray, seed: int) -> _Playing:
        """Return the state before the first step. Every environment is at LAST, so its first step resets it."""
        num_envs, spec = len(env_keys), self._envs.codec.action_spec
        envs = self._envs.init(jnp.asarray(env_keys))
        shapes = jax.eval_shape(self._envs.step, envs, np.zeros((num_envs, *spec.shape), spec.dtype))[1]
        timestep = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        timestep = timestep._replace(step_type=np.full_like(timestep.step_type, LAST))
        state = jax.tree.map(jnp.asarray, self._agent.initial_state(num_envs))
        call = jnp.asarray(call_number(EVALUATOR_RANK, 0))
        return _Playing(envs, timestep, state, jax.random.PRNGKey(seed), call)

    def check(self, timestep: TimeStep) -> None:
        """Raise EnvError if a timestep [N, ...] is not finite, or has no legal action."""
        if self._finite_check is not None:
            self._finite_check(timestep)
        self._mask_check(timestep)

    def _play(
        self, params: Params, playing: _Playing, left: jax.Array, most: jax.Array
    ) -> tuple[_Playing, _PlayedSteps]:
        """Make up to `most` steps, until each environment has completed its `left` [N] episodes."""
        self._agent.check_observation(playing.timestep.observation)  # runs only while JAX traces this function
        initial, shape = self._agent.initial_state(len(left)), (_MOST_STEPS, len(left))

        def may_continue(loop: Any) -> jax.Array:
            playing, steps, left = loop
            is_incomplete = (steps.total < most) & jnp.any(left > 0)
            is_valid = is_incomplete & (self._mask_check.first_wrong(playing.timestep, jnp) < 0)
            return is_valid if self._finite_check is None else is_valid & are_finite(playing.timestep)

        def step(loop: Any) -> Any:
            (envs, timestep, state, rng, call), steps, left = loop
            output, state = self._agent.eval_step(jax.random.fold_in(rng, call), params, timestep, state)
            envs, timestep = self._envs.step(envs, output.action)
            state = reset_where(timestep.step_type == FIRST, state, initial, jnp)
            steps = _PlayedSteps(
                steps.total + 1,
                steps.step_type.at[steps.total].set(timestep.step_type),
                steps.reward.at[steps.total].set(timestep.reward),
            )
            return _Playing(envs, timestep, state, rng, call + 1), steps, left - (timestep.step_type == LAST)

        no_steps = _PlayedSteps(jnp.zeros((), jnp.int32), jnp.zeros(shape, jnp.uint8), jnp.zeros(shape, jnp.float32))
        return jax.lax.while_loop(may_continue, step, (playing, no_steps, left))[:2]


class DeviceEvaluator:
    """Plays episodes like `Evaluator`, with many steps in one jitted call. The result is the same.

    A call ends after about half a second, or when all episodes are complete. Between calls, signals and `stop` take
    effect. The calls are compiled once, for all evaluations.

    Args:
        program: the jitted function.
        env_keys: `[N, 2]` uint32, a key for each environment.
        learner: source of the parameters.
        episodes: number of episodes to play.
        seed: seed of agents that draw random numbers.
        max_episode_length: maximum number of steps in an episode. A longer episode is an error.

    Attributes:
        steps: environment steps in the current or last evaluation, over all environments.
    """

    def __init__(
        self,
        program: EvaluationProgram,
        env_keys: np.ndarray,
        learner: ParamSource,
        episodes: int,
        *,
        seed: int,
        max_episode_length: int,
    ) -> None:
        self._program, self._env_keys, self._learner = program, env_keys, learner
        self._episodes, self._max_episode_length = episodes, max_episode_length
        self._begin = program.begin(env_keys, seed)
        self._call_length = CallLength()
        self._stop = threading.Event()
        self.steps = 0

    def evaluate(self) -> Logs:
        """Play the episodes. See `Evaluator.evaluate`."""
        version, params = self._learner.get_params(-1)
        params, playing, self.steps = jax.device_put(params), self._begin, 0
        episodes = PlayedEpisodes(self._episodes, len(self._env_keys), self._max_episode_length)
        while not episodes.are_complete:
            if self._stop.is_set():
                raise StoppedError("The evaluation was stopped.")
            began, most = time.perf_counter(), np.int32(min(self._call_length.count, _MOST_STEPS))
            with COMPUTING:
                playing, steps = self._program.play(params, playing, episodes.left, most)
                steps, timestep = jax.device_get((steps, playing.timestep))
            count = int(steps.total)
            self._call_length.choose(count, time.perf_counter() - began)
            self.steps += count * len(self._env_keys)
            self._program.check(timestep)
            for step_type, reward in zip(steps.step_type[:count], steps.reward[:count], strict=True):
                episodes.count(step_type, reward)
        return episodes.result(version)

    def stop(self) -> None:
        """End `evaluate`, now and in later calls. Any thread may call it."""
        self._stop.set()
