"""Rounds of the topology `fused`: act in JAX environments, then learn, in one jitted call.

    run(carry, limits)                    # one jitted call, with donated buffers
      while within the limits:            # see `make_rounds`
        collect                           # for PPO, an unroll of each environment: a scan of Agent.actor_step
                                          #   and BatchedJaxEnv.step, then `add` of the replay
        learn, while the replay is ready  # `draw` of the replay, and Agent.learner_step

`make_rounds` is the only loop. `Rounds.run` is this loop in one jitted call, `in_parts` is the loop in Python with
jitted parts, and `run_rounds` in `seeds.py` is the loop over several seeds.

Everything that changes is in the `Carry`. Random numbers depend only on constant keys and on counters in the carry, so
the results do not depend on how many rounds a call makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from rlframe import compilation
from rlframe.agents.base import Agent
from rlframe.agents.trees import reset_where
from rlframe.device.replay import DeviceReplay, StepRecord
from rlframe.envs.checks import MaskCheck
from rlframe.envs.jax_env import BatchedJaxEnv, EnvCarry
from rlframe.learners.update import are_finite, check_are_numbers
from rlframe.sharding import copy_arrays, divide_rows, keep_whole
from rlframe.types import FIRST, LAST, AgentState, Batch, Logs, Params, TimeStep, Tree

# Added to the run's key to get the key of the replay. `Acting.calls` is the number for the keys of the actions, and
# does not reach this number.
_REPLAY_KEY = 2**32 - 1


class Start(NamedTuple):
    """The arguments of `Rounds.init`: the values with which a run starts."""

    rng: Any  # [2] uint32: key of the actions and the replay
    params: Params
    learner_state: Any
    env_keys: Any  # [N, 2] uint32: a key for each environment


class Acting(NamedTuple):
    """The part of a `Carry` that each environment step changes, except the replay."""

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

    rng: jax.Array  # [2] uint32, a constant key of the actions
    replay_rng: jax.Array  # [2] uint32, a constant key of the replay's draws
    params: Params
    learner_state: Any
    actor_params: Tree  # what `actor_step` receives; unlike `params`, it is always finite
    acting: Acting
    replay: Any
    logs: Logs  # of the newest update
    tally: Tally


class CallLimits(NamedTuple):
    """When a call ends: at the first end of a round at which one of the numbers is reached. All are [] int32."""

    rounds: Any
    env_steps: Any
    updates: Any  # the updates also end within a round; the next call then makes the remaining ones first
    enough_updates: Any  # like `updates`, but all updates that are due are made


class Parts(NamedTuple):
    """The functions of `make_rounds`."""

    is_within: Callable[[Carry], jax.Array]  # [] bool: the call has not reached a limit
    may_learn: Callable[[Carry], jax.Array]  # [] bool: an update is due, and allowed by the limits
    collect: Callable[[Carry], Carry]
    learn: Callable[[Carry], Carry]


def make_rounds(
    carry: Carry,
    parts: Parts,
    updates_per_round: Literal["one", "at most one", "many"],
    while_loop: Callable[..., Carry] = jax.lax.while_loop,
    cond: Callable[..., Carry] = jax.lax.cond,
) -> Carry:
    """Make rounds until a limit is reached.

    Args:
        carry: the state before the rounds.
        parts: the functions of a round.
        updates_per_round: see `DeviceReplay`.
        while_loop, cond: the functions of `jax.lax`, or functions with the same results.
    """

    def needs_steps(carry: Carry) -> jax.Array:
        return parts.is_within(carry) & ~parts.may_learn(carry)

    def make_round(carry: Carry) -> Carry:
        if updates_per_round == "one":
            return parts.learn(parts.collect(carry))
        if updates_per_round == "at most one":
            carry = parts.collect(carry)
            return cond(parts.may_learn(carry), parts.learn, lambda carry: carry, carry)
        # A session can end between two updates of a round. The next session makes the remaining updates first.
        carry = while_loop(needs_steps, parts.collect, carry)
        return while_loop(parts.may_learn, parts.learn, carry)

    return while_loop(parts.is_within, make_round, carry)


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
        """Return the carry before the first round. All environments are at FIRST. The arguments are a `Start`.

        No array occurs twice in the carry, so that calls can donate it.
        """
        agent = self._agent
        acting, actor_params = self._begin(params, learner_state, env_keys)
        replay_rng = jax.random.fold_in(rng, _REPLAY_KEY)
        replay = self.replay.init(self._record(rng, actor_params, acting))
        logs: Logs = {}
        if agent.jit_learner_step:  # a loop needs all logs before the first update
            batch = jax.eval_shape(self.replay.draw, replay_rng, replay)[1]
            shapes = jax.eval_shape(agent.learner_step, params, learner_state, batch)[2]
            logs = {name: jnp.zeros((), jnp.float32) for name in shapes if name != "priorities"}
        carry = Carry(rng, replay_rng, params, learner_state, actor_params, acting, replay, logs, no_tally())
        return self.divide(jax.tree.map(jnp.copy, carry))

    def divide(self, carry: Carry) -> Carry:
        """Divide environments and replay between the learner's devices, which each have the rest. See `sharding`."""
        divided = {"acting": divide_rows(carry.acting), "replay": self.replay.divide(carry.replay)}
        others = {name: part for name, part in carry._asdict().items() if name not in divided}
        return Carry(**keep_whole(others), **divided)

    def replay_shapes(self, start: Start) -> Any:
        """Return the shapes and dtypes of the replay of `init`, without computing it."""

        def make(rng: jax.Array, *others: Any) -> Any:
            acting, actor_params = self._begin(*others)
            return self.replay.init(self._record(rng, actor_params, acting))

        return jax.eval_shape(make, *start)

    def _begin(self, params: Params, learner_state: Any, env_keys: jax.Array) -> tuple[Acting, Tree]:
        """Return the state of acting after the environments' reset, and the parameters for acting."""
        spec, num_envs = self._envs.codec.action_spec, self._num_envs
        no_actions = jnp.zeros((num_envs, *spec.shape), spec.dtype)
        envs, timestep = self._envs.step(self._envs.init(env_keys), no_actions)
        state = jax.tree.map(jnp.asarray, self._agent.initial_state(num_envs))
        zeros = jnp.zeros(num_envs, jnp.float32)
        acting = Acting(envs, timestep, state, jnp.zeros((), jnp.uint32), zeros, zeros.astype(jnp.int32))
        return acting, self._agent.actor_params(params, learner_state)

    def _record(self, rng: jax.Array, actor_params: Tree, acting: Acting) -> StepRecord:
        """Return the shapes and dtypes of the record of a step."""
        return jax.eval_shape(self._act, rng, actor_params, acting)[1]

    def run(self, carry: Carry, limits: CallLimits) -> Carry:
        """Make rounds until a limit is reached. `carry.tally` of the result is about these rounds."""
        parts = Parts(
            functools.partial(self.is_within, limits=limits),
            functools.partial(self.may_learn, limits=limits),
            self.collect,
            self.learn,
        )
        return make_rounds(carry._replace(tally=no_tally()), parts, self.replay.updates_per_round)

    def is_within(self, carry: Carry, limits: CallLimits) -> jax.Array:
        """Return [] bool: True if the call has not reached a limit."""
        tally = carry.tally
        has_rounds = (tally.rounds < limits.rounds) & (tally.env_steps < limits.env_steps)
        has_updates = tally.updates < jnp.minimum(limits.updates, limits.enough_updates)
        return has_rounds & has_updates & (tally.failed_update == 0) & (tally.blocked_env < 0)

    def may_learn(self, carry: Carry, limits: CallLimits) -> jax.Array:
        """Return [] bool: True if an update is due, and `limits.updates` is not reached."""
        is_allowed = (carry.tally.updates < limits.updates) & (carry.tally.failed_update == 0)
        return is_allowed & self.replay.is_ready(carry.replay)

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
        tally = tally._replace(rounds=tally.rounds + 1)
        return self.divide(carry._replace(acting=acting, tally=tally, replay=replay))

    def draw(self, rng: jax.Array, replay: Any) -> tuple[Any, Batch, Any]:
        """Draw a batch, and divide it between the learner's devices. See `DeviceReplay.draw`."""
        replay, batch, places = self.replay.draw(rng, replay)
        return replay, divide_rows(batch), places

    def learn(self, carry: Carry) -> Carry:
        """Draw a batch, and do one update."""
        replay, batch, places = self.draw(carry.replay_rng, carry.replay)
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
        after = carry._replace(
            params=params,
            learner_state=learner_state,
            actor_params=actor_params,
            replay=replay,
            logs=logs,
            tally=tally._replace(updates=updates, failed_update=failed),
        )
        return self.divide(after)

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
            initial = self._agent.initial_state(self._num_envs)
            next_state = reset_where(following.step_type == FIRST, next_state, initial, jnp)
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


def in_parts(rounds: Rounds, agent: Agent) -> Callable[[Carry, CallLimits], Carry]:
    """Return a function like `Rounds.run` that jits the parts of a round separately, and loops in Python."""
    is_within = compilation.jit(rounds.is_within, differentiates=False)
    may_learn = compilation.jit(rounds.may_learn, differentiates=False)
    collect = compilation.jit(rounds.collect, donate_argnums=(0,), differentiates=False)
    learn = compilation.jit(rounds.learn, donate_argnums=(0,), differentiates=True)
    draw = compilation.jit(rounds.draw, differentiates=False)
    finish = compilation.jit(rounds.finish_update, differentiates=False)

    def learn_in_python(carry: Carry) -> Carry:
        replay, batch, places = draw(carry.replay_rng, carry.replay)
        params, learner_state, logs = agent.learner_step(carry.params, carry.learner_state, batch)
        return finish(carry._replace(replay=replay), params, learner_state, dict(logs), places)

    def while_loop(may_continue: Callable[[Carry], Any], function: Callable[[Carry], Carry], carry: Carry) -> Carry:
        while may_continue(carry):
            carry = function(carry)
        return carry

    def cond(condition: Any, function: Callable[..., Carry], otherwise: Callable[..., Carry], carry: Carry) -> Carry:
        return function(carry) if condition else otherwise(carry)

    def run(carry: Carry, limits: CallLimits) -> Carry:
        parts = Parts(
            lambda carry: is_within(carry, limits),
            lambda carry: may_learn(carry, limits),
            collect,
            learn if agent.jit_learner_step else learn_in_python,
        )
        carry = carry._replace(tally=copy_arrays(no_tally()))  # a donated array must not occur twice
        return make_rounds(carry, parts, rounds.replay.updates_per_round, while_loop, cond)

    return run
