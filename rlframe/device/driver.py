"""The driver of the topology `fused`: it calls the jitted rounds, and chooses how many rounds a call makes."""

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
from rlframe.device.ring import StepRing, UnrollQueue
from rlframe.device.rounds import CallLimits, Carry, Rounds, Tally, no_tally, num_bytes
from rlframe.envs.action_masks import no_legal_action_error
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.interprocess.phases import COMPUTING
from rlframe.learners import Learner
from rlframe.learners.update import copy_arrays
from rlframe.types import Logs, Params

_CALL_SECONDS = 0.5  # intended duration of a call: signals and progress wait for it
MOST = 2**30  # limit of the counters of one call, which are int32


class Start(NamedTuple):
    """The state of a run before its first round of this session."""

    rng: Any  # [2] uint32: key of the actions and the replay
    params: Params
    learner_state: Any
    env_keys: Any  # [N, 2] uint32: a key for each environment


class CallResult(NamedTuple):
    """The results of a call for one run."""

    params: Params
    learner_state: Any
    tally: Tally  # on the host
    logs: Logs  # of the newest update, on the host


class Calls(Protocol):
    """Makes the jitted calls of one run. The arrays of the run stay on the device."""

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
        calls: makes the calls. The driver closes it.
        max_learner_steps: number of updates after which the session ends. None means no limit.
    """

    has_replay = replay_is_small = True
    replay_is_saved = False  # it is part of `get_state`

    def __init__(self, agent: Agent, learner: Learner, calls: Calls, max_learner_steps: int | None = None) -> None:
        self.spec, self.learner = agent.replay_spec, learner
        self._calls, self._max_learner_steps = calls, max_learner_steps
        self._counts = {"env_steps": 0, "episodes": 0, "return_sum": 0.0, "length_sum": 0.0}
        if learner.restored is not None and learner.restored.extras is not None:
            self._counts = dict(learner.restored.extras["counts"])

    @property
    def env_steps(self) -> int:
        """See `Driver`."""
        return int(self._counts["env_steps"])

    def advance(self, until: float, must_end: Callable[[], bool]) -> Logs | None:
        """See `Driver`. Make rounds for about half a second.

        Raises:
            EnvError: the action mask of an environment allows no action.
        """
        updates = MOST
        if self._max_learner_steps is not None:
            updates = self._max_learner_steps - self.learner.learner_steps
        with COMPUTING:
            params, learner_state, tally, logs = self._calls.run(int(min(until - self.env_steps, MOST)), updates)
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
        return self._calls.replay_stats()

    def get_state(self, *, with_envs: bool) -> dict[str, Any]:
        """See `Driver`. The state contains the environments and the replay, so a resumed run continues exactly."""
        return {"device": self._calls.get_state(), "counts": self._counts}

    def free_envs(self) -> None:
        """See `Driver`. JAX environments have nothing to close."""

    def close(self) -> None:
        """See `Driver`."""
        self.learner.close()
        self._calls.close()


class CallLength:
    """The number K of rounds of the next call, chosen so that a call takes about half a second.

    K is an argument of the jitted function, so one compilation is enough. The results do not depend on K.

    Attributes:
        rounds: K.
    """

    def __init__(self) -> None:
        self.rounds = 1  # the first call also compiles
        self._has_compiled = False

    def choose(self, rounds: int, seconds: float) -> None:
        """Choose K from the number of rounds and the duration of the newest call."""
        if not self._has_compiled:  # this call compiled, so its duration says nothing
            self._has_compiled = True
        elif rounds:
            wanted = rounds * _CALL_SECONDS / max(seconds, 1e-6)
            self.rounds = int(min(max(1.0, wanted), 10.0 * rounds, MOST))


class Program:
    """The jitted functions of a run. They do not depend on the seed, so several runs can share them.

    Args:
        agent: the agent.
        envs: the environments.
        num_envs: number of environments.
        clip_rewards: see `Rounds`.

    Attributes:
        rounds: the rounds.
        in_parts: True if the parts of a round are jitted separately.
    """

    def __init__(self, agent: Agent, envs: BatchedJaxEnv, num_envs: int, clip_rewards: float | None) -> None:
        spec = agent.replay_spec
        replay = UnrollQueue(spec, num_envs) if spec.kind == "queue" else StepRing(spec, num_envs)
        self.rounds = Rounds(agent, envs, replay, num_envs, clip_rewards)
        # On a CPU, the gradient of a convolution takes many times as long inside a loop (docs/project/speed.md).
        self.in_parts = has_images(agent.observation_spec) and jax.default_backend() == "cpu"
        self.run: Callable[[Carry, CallLimits], Carry]
        if self.in_parts:
            self.run = _in_parts(self.rounds, agent)
        else:
            self.run = compilation.jit(self.rounds.run, donate_argnums=(0,), differentiates=True)
        self.init = compilation.jit(self.rounds.init, differentiates=False)


class SingleCalls:
    """The calls of a run. See `Calls`.

    Args:
        program: the jitted functions.
        start: the start of the run.
        restored: a result of `get_state`, or None.

    Raises:
        UsageError: the replay does not fit into memory.
    """

    def __init__(self, program: Program, start: Start, restored: list[np.ndarray] | None) -> None:
        self._run, self._length = program.run, CallLength()
        # Copy, because the calls donate the carry, and no array may occur twice in it.
        self._carry: Carry = copy_arrays(program.init(*start))
        if restored is not None:
            self._carry = with_state(self._carry, [jnp.array(leaf) for leaf in restored])

    def run(self, env_steps: int, updates: int) -> CallResult:
        """See `Calls`."""
        began = time.perf_counter()
        limits = CallLimits(*np.array([self._length.rounds, env_steps, updates], np.int32))
        carry = self._run(self._carry, limits)
        tally, logs = jax.device_get((carry.tally, carry.logs))  # the next call donates the arrays
        self._carry = carry
        self._length.choose(int(tally.rounds), time.perf_counter() - began)
        return CallResult(carry.params, carry.learner_state, tally, logs)

    def get_state(self) -> list[np.ndarray]:
        """See `Calls`."""
        return jax.tree.map(np.asarray, jax.tree.leaves(state_of(self._carry)))

    def replay_stats(self) -> dict[str, int]:
        """See `Calls`."""
        return {"items": int(self._carry.replay.size), "bytes": num_bytes(self._carry.replay)}

    def close(self) -> None:
        """See `Calls`."""


def state_of(carry: Carry) -> tuple[Any, ...]:
    """Return the parts of a carry that a checkpoint contains. The Learner saves the parameters and its state."""
    return carry.acting, carry.replay, carry.actor_params


def with_state(carry: Carry, leaves: list[Any]) -> Carry:
    """Return the carry with the leaves of a saved `state_of`."""
    acting, replay, actor_params = jax.tree.unflatten(jax.tree.structure(state_of(carry)), leaves)
    return carry._replace(acting=acting, replay=replay, actor_params=actor_params)


def _in_parts(rounds: Rounds, agent: Agent) -> Callable[[Carry, CallLimits], Carry]:
    """Return a function like `Rounds.run` that jits the parts of a round separately, and loops in Python."""
    collect = compilation.jit(rounds.collect, donate_argnums=(0,), differentiates=False)
    may_learn = compilation.jit(rounds.may_learn, differentiates=False)
    learn = compilation.jit(rounds.learn, donate_argnums=(0,), differentiates=True)
    draw = compilation.jit(rounds.replay.draw, differentiates=False)
    finish = compilation.jit(rounds.finish_update, differentiates=False)

    def learn_in_parts(carry: Carry) -> Carry:
        replay, batch, places = draw(carry.rng, carry.replay)
        params, learner_state, logs = agent.learner_step(carry.params, carry.learner_state, batch)
        return finish(carry._replace(replay=replay), params, learner_state, dict(logs), places)

    learn_once = learn if agent.jit_learner_step else learn_in_parts

    def run(carry: Carry, limits: CallLimits) -> Carry:
        carry = carry._replace(tally=copy_arrays(no_tally()))  # a donated array must not occur twice
        while rounds.is_within(carry, limits):
            carry = collect(carry)
            while may_learn(carry, limits):
                carry = learn_once(carry)
                if rounds.replay.updates_per_round != "many":
                    break
        return carry

    return run
