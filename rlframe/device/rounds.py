"""Rounds of the topology `fused`: act in JAX environments, then learn, in one jitted call.

    run(carry, limits)                    # one jitted call, with donated buffers
      while within the limits:
        collect                           # for PPO, an unroll of each environment: a scan of Agent.actor_step
                                          #   and BatchedJaxEnv.step, then `add` of the replay
        learn, while the replay is ready  # `draw` of the replay, and Agent.learner_step

Everything that changes is in the `Carry`. Random numbers depend only on constant keys and on counters in the carry, so
the results do not depend on how many rounds a call makes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from rlframe.actors.stepper import reset_at_first
from rlframe.agents.base import Agent
from rlframe.device.ring import DeviceReplay, StepRecord
from rlframe.envs.action_masks import MaskCheck
from rlframe.envs.jax_env import BatchedJaxEnv, EnvCarry
from rlframe.errors import UsageError
from rlframe.learners.update import are_finite, check_are_numbers
from rlframe.types import FIRST, LAST, AgentState, Logs, Params, TimeStep, Tree


class Acting(NamedTuple):
    """The state of the environments and of acting."""

    envs: EnvCarry
    timestep: TimeStep  # [N, ...], the newest timestep
    agent_state: AgentState  # [N, ...]
    calls: jax.Array  # [] uint32: number of calls of `actor_step`; it determines the random numbers of the next call
    returns: jax.Array  # [N] float32: sum of the rewards of the current episode
    lengths: jax.Array  # [N] int32: steps of the current episode


class Tally(NamedTuple):
    """Counts and sums of one call. The host adds them to its own counters, which cannot overflow."""

    rounds: jax.Array  # [] int32
    env_steps: jax.Array  # [] int32
    updates: jax.Array  # [] int32
    episodes: jax.Array  # [] int32
    return_sum: jax.Array  # [] float32, over the episodes that ended
    length_sum: jax.Array  # [] int32
    failed_update: jax.Array  # [] int32: number in this call of the first update that is not finite; 0 if all are
    blocked_env: jax.Array  # [] int32: an environment whose action mask allows no action; -1 if there is none


class Carry(NamedTuple):
    """Everything that rounds change."""

    rng: jax.Array  # [2] uint32, a constant key of the actions and the replay
    params: Params
    learner_state: Any
    actor_params: Tree  # what `actor_step` receives; unlike `params`, it is always finite
    acting: Acting
    replay: Any
    logs: Logs  # of the newest update
    tally: Tally


class CallLimits(NamedTuple):
    """When a call ends: at the first round boundary at which one of the numbers is reached. All are [] int32."""

    rounds: Any
    env_steps: Any
    updates: Any


class Rounds:
    """The pure functions of fused training.

    Args:
        agent: the agent.
        envs: the environments.
        replay: the replay.
        num_envs: number of environments.
        clip_rewards: rewards are clipped to [-clip_rewards, clip_rewards] for learning. None means no clipping.
    """

    def __init__(
        self,
        agent: Agent,
        envs: BatchedJaxEnv,
        replay: DeviceReplay,
        num_envs: int,
        clip_rewards: float | None,
    ) -> None:
        self._agent, self._envs, self.replay, self._num_envs = agent, envs, replay, num_envs
        self._clip_rewards = clip_rewards
        self._mask_check = MaskCheck(envs.codec.observation_spec)

    def init(self, rng: jax.Array, params: Params, learner_state: Any, env_keys: jax.Array) -> Carry:
        """Return the carry before the first round. All environments are at FIRST."""
        agent, num_envs = self._agent, self._num_envs
        spec = self._envs.codec.action_spec
        no_actions = jnp.zeros((num_envs, *spec.shape), spec.dtype)
        envs, timestep = self._envs.step(self._envs.init(env_keys), no_actions)
        state = jax.tree.map(jnp.asarray, agent.initial_state(num_envs))
        zeros = jnp.zeros(num_envs, jnp.float32)
        acting = Acting(envs, timestep, state, jnp.zeros((), jnp.uint32), zeros, zeros.astype(jnp.int32))
        actor_params = agent.actor_params(params, learner_state)
        record = jax.eval_shape(self._act, rng, actor_params, acting)[1]
        replay = self.replay.init(record)
        check_memory(replay)
        logs: Logs = {}
        if agent.jit_learner_step:  # a loop needs all logs before the first update
            batch = jax.eval_shape(self.replay.draw, rng, replay)[1]
            shapes = jax.eval_shape(agent.learner_step, params, learner_state, batch)[2]
            logs = {name: jnp.zeros((), jnp.float32) for name in shapes if name != "priorities"}
        return Carry(rng, params, learner_state, actor_params, acting, replay, logs, no_tally())

    def run(self, carry: Carry, limits: CallLimits) -> Carry:
        """Make rounds until a limit is reached. `carry.tally` of the result is about these rounds."""

        def is_within(carry: Carry) -> jax.Array:
            return self.is_within(carry, limits)

        def make_round(carry: Carry) -> Carry:
            carry = self.collect(carry)
            if self.replay.updates_per_round == "one":
                return self.learn(carry)
            if self.replay.updates_per_round == "at most one":
                return jax.lax.cond(self.may_learn(carry, limits), self.learn, lambda carry: carry, carry)
            return jax.lax.while_loop(lambda carry: self.may_learn(carry, limits), self.learn, carry)

        return jax.lax.while_loop(is_within, make_round, carry._replace(tally=no_tally()))

    def is_within(self, carry: Carry, limits: CallLimits) -> jax.Array:
        """Return [] bool: True if the call has not reached a limit."""
        tally = carry.tally
        is_within = (tally.rounds < limits.rounds) & (tally.env_steps < limits.env_steps)
        return is_within & (tally.updates < limits.updates) & (tally.failed_update == 0) & (tally.blocked_env < 0)

    def may_learn(self, carry: Carry, limits: CallLimits) -> jax.Array:
        """Return [] bool: True if an update is due, and the call has not reached a limit of updates."""
        is_within = (carry.tally.updates < limits.updates) & (carry.tally.failed_update == 0)
        return is_within & self.replay.is_ready(carry.replay)

    def collect(self, carry: Carry) -> Carry:
        """Step all environments for a round, and add the steps to the replay."""

        def act(state: tuple[Acting, Tally], _: None) -> tuple[tuple[Acting, Tally], StepRecord]:
            acting, record, reward = self._act(carry.rng, carry.actor_params, state[0])
            acting, tally = _count(acting, state[1], record.next_timestep, reward)
            blocked = self._mask_check.first_wrong(record.next_timestep, jnp).astype(jnp.int32)
            tally = tally._replace(blocked_env=jnp.where(tally.blocked_env < 0, blocked, tally.blocked_env))
            return (acting, tally), record

        state = (carry.acting, carry.tally)
        (acting, tally), records = jax.lax.scan(act, state, length=self.replay.steps_per_round)
        replay = self.replay.add(carry.replay, records)
        return carry._replace(acting=acting, tally=tally._replace(rounds=tally.rounds + 1), replay=replay)

    def learn(self, carry: Carry) -> Carry:
        """Draw a batch, and do one update."""
        replay, batch, places = self.replay.draw(carry.rng, carry.replay)
        params, learner_state, logs = self._agent.learner_step(carry.params, carry.learner_state, batch)
        return self.finish_update(carry._replace(replay=replay), params, learner_state, dict(logs), places)

    def finish_update(self, carry: Carry, params: Params, learner_state: Any, logs: Logs, places: Any) -> Carry:
        """Return the carry after an update. Actors keep the old parameters if the new ones are not finite."""
        priorities = logs.pop("priorities", None)
        replay, tally = carry.replay, carry.tally
        if priorities is not None:
            replay = self.replay.set_priorities(replay, places, priorities)
        actor_params = self._agent.actor_params(params, learner_state)
        is_finite = are_finite((params, actor_params, logs.get("loss", 0.0)))
        actor_params = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), actor_params, carry.actor_params)
        updates = tally.updates + 1
        failed = jnp.where((tally.failed_update == 0) & ~is_finite, updates, tally.failed_update)
        check_are_numbers(logs)
        logs = {name: jnp.asarray(value, jnp.float32).reshape(()) for name, value in logs.items()}
        return carry._replace(
            params=params,
            learner_state=learner_state,
            actor_params=actor_params,
            replay=replay,
            logs=logs,
            tally=tally._replace(updates=updates, failed_update=failed),
        )

    def _act(self, rng: jax.Array, actor_params: Tree, acting: Acting) -> tuple[Acting, StepRecord, jax.Array]:
        """Step all environments once. Return also the rewards before clipping, [N]."""
        calls, timestep, state = acting.calls + 1, acting.timestep, acting.agent_state
        output, next_state = self._agent.actor_step(jax.random.fold_in(rng, calls), actor_params, timestep, state)
        envs, following = self._envs.step(acting.envs, output.action)
        reward = following.reward
        if self._clip_rewards is not None:
            following = following._replace(reward=jnp.clip(reward, -self._clip_rewards, self._clip_rewards))
        record = StepRecord(timestep, output.action, output.extras, state, following)
        if jax.tree.leaves(next_state):
            next_state = reset_at_first(following, next_state, self._agent.initial_state(self._num_envs), jnp)
        return acting._replace(envs=envs, timestep=following, agent_state=next_state, calls=calls), record, reward


def no_tally() -> Tally:
    """Return the tally before the first round of a call."""
    zero = jnp.zeros((), jnp.int32)
    return Tally(zero, zero, zero, zero, zero.astype(jnp.float32), zero, zero, zero - 1)


def _count(acting: Acting, tally: Tally, timestep: TimeStep, reward: jax.Array) -> tuple[Acting, Tally]:
    """Count a step and the episodes that it ended, like `EpisodeStatistics`."""
    first, last = timestep.step_type == FIRST, timestep.step_type == LAST
    returns = jnp.where(first, 0.0, acting.returns + reward)
    lengths = jnp.where(first, 0, acting.lengths + 1)
    tally = tally._replace(
        env_steps=tally.env_steps + jnp.count_nonzero(~first).astype(jnp.int32),
        episodes=tally.episodes + jnp.count_nonzero(last).astype(jnp.int32),
        return_sum=tally.return_sum + jnp.where(last, returns, 0.0).sum(),
        length_sum=tally.length_sum + jnp.where(last, lengths, 0).sum(),
    )
    return acting._replace(returns=returns, lengths=lengths), tally


def num_bytes(tree: Any) -> int:
    """Return the size of all arrays of a tree."""
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def check_memory(replay: Any) -> None:
    """Raise UsageError if the replay needs more memory than the device has."""
    stats = jax.devices()[0].memory_stats() or {}  # a CPU has no statistics
    free = stats.get("bytes_limit", psutil.virtual_memory().available) - stats.get("bytes_in_use", 0)
    needed = num_bytes(replay)
    if needed > free:
        raise UsageError(
            f"The replay needs {needed / 2**30:.1f} GiB of device memory, but only {free / 2**30:.1f} GiB are free. "
            "Lower --replay-capacity."
        )
