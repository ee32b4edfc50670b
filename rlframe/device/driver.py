"""The driver of the topology `fused`: it calls the jitted rounds, and chooses how many rounds a call makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe import compilation
from rlframe.agents.base import Agent
from rlframe.agents.networks import has_images
from rlframe.device.ring import StepRing, UnrollQueue
from rlframe.device.rounds import CallLimits, Carry, Rounds, no_tally, num_bytes
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.interprocess.phases import COMPUTING
from rlframe.learners import Learner
from rlframe.learners.update import copy_arrays
from rlframe.types import Logs

_CALL_SECONDS = 0.5  # intended duration of a call: signals and progress wait for it
_MOST = 2**30  # limit of the counters of one call, which are int32


class FusedDriver:
    """Makes rounds of steps and updates in jitted calls, with JAX environments. See `rlframe.programs.training.driver`.

    A call makes K rounds. K is an argument of the jitted function, so one compilation is enough. It is chosen so that a
    call takes about half a second. A call ends earlier at a step at which the caller has something to do. The results
    do not depend on K.

    Args:
        agent: the agent.
        envs: the environments.
        env_keys: `[N, 2]` uint32, a key for each environment.
        learner: the Learner, without a replay buffer. The driver closes it.
        seed: seed of the actions and of the replay.
        clip_rewards: see `Rounds`.
        max_learner_steps: number of updates after which the session ends. None means no limit.

    Raises:
        UsageError: the replay does not fit into memory.
    """

    has_replay = replay_is_small = True
    replay_is_saved = False  # it is part of `get_state`

    def __init__(
        self,
        agent: Agent,
        envs: BatchedJaxEnv,
        env_keys: np.ndarray,
        learner: Learner,
        *,
        seed: int,
        clip_rewards: float | None = None,
        max_learner_steps: int | None = None,
    ) -> None:
        num_envs, self.spec, self.learner = len(env_keys), agent.replay_spec, learner
        self._max_learner_steps = max_learner_steps
        is_queue = self.spec.kind == "queue"
        replay = UnrollQueue(self.spec, num_envs) if is_queue else StepRing(self.spec, num_envs, seed)
        rounds = Rounds(agent, envs, replay, num_envs, clip_rewards, seed)
        # On a CPU, the gradient of a convolution takes many times as long inside a loop (docs/performance.md).
        convolves = has_images(agent.observation_spec) and jax.default_backend() == "cpu"
        self._run: Callable[[Carry, CallLimits], Carry]
        if convolves:
            self._run = _in_parts(rounds, agent)
        else:
            self._run = compilation.jit(rounds.run, donate_argnums=(0,), differentiates=True)
        self._counts = {"env_steps": 0, "episodes": 0, "return_sum": 0.0, "length_sum": 0.0}
        self._rounds = 1  # rounds of the next call; the first call also compiles
        self._has_compiled = False
        init = compilation.jit(rounds.init, differentiates=False)
        # Copy, because the calls donate the carry, and no array may occur twice in it.
        self._carry: Carry = copy_arrays(init(*learner.state, env_keys))
        if learner.restored is not None:
            self._restore(learner.restored.extras)

    @property
    def env_steps(self) -> int:
        """See `Driver`."""
        return int(self._counts["env_steps"])

    def advance(self, until: float, must_end: Callable[[], bool]) -> Logs | None:
        """See `Driver`. Make rounds for about half a second."""
        params, learner_state = self.learner.state
        updates = _MOST
        if self._max_learner_steps is not None:
            updates = self._max_learner_steps - self.learner.learner_steps
        limits = CallLimits(*np.array([self._rounds, min(until - self.env_steps, _MOST), updates], np.int32))
        began = time.perf_counter()
        with COMPUTING:
            carry = self._run(self._carry._replace(params=params, learner_state=learner_state), limits)
            tally, logs = jax.device_get((carry.tally, carry.logs))  # the next call donates the arrays
        self._carry = carry
        for name in self._counts:
            self._counts[name] += getattr(tally, name).item()
        self._choose_rounds(int(tally.rounds), time.perf_counter() - began)
        self.learner.adopt(carry.params, carry.learner_state, logs, int(tally.updates), int(tally.failed_update))
        return logs if tally.updates else None

    def _choose_rounds(self, rounds: int, seconds: float) -> None:
        """Choose K for the next call from the number of rounds and the duration of this call."""
        if not self._has_compiled:  # this call compiled, so its duration says nothing
            self._has_compiled = True
        elif rounds:
            wanted = rounds * _CALL_SECONDS / max(seconds, 1e-6)
            self._rounds = int(min(max(1.0, wanted), 10.0 * rounds, _MOST))

    def stats(self) -> dict[str, Any]:
        """See `Driver`."""
        return {"rank": 0, "incarnation": 0, **self._counts, "logged": {}}

    def replay_stats(self) -> dict[str, int]:
        """See `Driver`."""
        size = getattr(self._carry.replay, "size", 0)
        return {"items": int(size), "bytes": num_bytes(self._carry.replay)}

    def get_state(self, *, with_envs: bool) -> dict[str, Any]:
        """See `Driver`. The state contains the environments and the replay, so a resumed run continues exactly."""
        parts = (self._carry.acting, self._carry.replay, self._carry.actor_params)
        return {"device": jax.tree.map(np.asarray, jax.tree.leaves(parts)), "counts": self._counts}

    def _restore(self, saved: dict[str, Any]) -> None:
        carry, self._counts = self._carry, dict(saved["counts"])
        parts = (carry.acting, carry.replay, carry.actor_params)
        leaves = [jnp.array(leaf) for leaf in saved["device"]]
        acting, replay, actor_params = jax.tree.unflatten(jax.tree.structure(parts), leaves)
        self._carry = carry._replace(acting=acting, replay=replay, actor_params=actor_params)

    def free_envs(self) -> None:
        """See `Driver`. JAX environments have nothing to close."""

    def close(self) -> None:
        """See `Driver`."""
        self.learner.close()


def _in_parts(rounds: Rounds, agent: Agent) -> Callable[[Carry, CallLimits], Carry]:
    """Return a function like `Rounds.run` that jits the parts of a round separately, and loops in Python."""
    collect = compilation.jit(rounds.collect, donate_argnums=(0,), differentiates=False)
    may_learn = compilation.jit(rounds.may_learn, differentiates=False)
    learn = compilation.jit(rounds.learn, donate_argnums=(0,), differentiates=True)
    draw = compilation.jit(rounds.replay.draw, differentiates=False)
    finish = compilation.jit(rounds.finish_update, differentiates=False)

    def learn_in_parts(carry: Carry) -> Carry:
        replay, batch, places = draw(carry.replay)
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
