"""The Actor steps environments with the actions of an inferencer, and adds the steps to a replay buffer."""

from __future__ import annotations

import collections
import math
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe import handles
from rlframe.actors.actor_replay import ActorReplay
from rlframe.actors.pacing import StepBudget, UnrollGate
from rlframe.actors.stepper import AsyncStepper, InferenceRequest, SyncStepper, merge_logs
from rlframe.envs import as_pool
from rlframe.envs.adapters import env_seed
from rlframe.errors import NoMethodError, StoppedError, UsageError
from rlframe.inferencers.base import Inference, StatelessInference, as_inference
from rlframe.metrics.rows import add_sums
from rlframe.replay import ReplayWriter
from rlframe.types import AgentState, Logs, global_env_ids


class Actor:
    """Steps its environments with the actions of an inferencer, and adds the steps to a replay buffer.

    Args:
        env_builder: an environment pool, one gymnasium or dm_env environment, or a callable that returns one of these.
            A callable with a parameter `seed` receives a seed derived from (seed, rank, incarnation). `env_builder`
            may also be a handle to an `EnvServer`, which has its own seed, or a list of handles to `EnvServer`s, each
            with an `AsyncEnv`.
        inferencer: an `Inference`, any object with `inference(env_ids, timestep)`, a handle to a node with such an
            object, or a list of these handles. With a list, the Actor calls the inferencer at index `rank` (modulo
            the length of the list). While that inferencer does not respond, the Actor calls the others.
        replay_buffer: a `ReplayWriter`, any object with `add(env_ids, step)`, a handle to such an object, or a
            `reverb.Client`. For a `reverb.Client`, the inferencer's `specs()` define the items.
        rank: number of this actor, from 0. None claims the next free rank of the buffer. A buffer that only has `add`
            assigns no ranks. With such a buffer, pass `rank` if there are several Actors, or if the Actor runs in a
            node of a program.
        seed: seed of the whole run.
        num_pools: number of pools to build. With two synchronous pools, `run()` steps one pool while an inferencer in
            another process computes the actions of the other pool.
        deadline: seconds for which a called node may be unreachable.
        logger: any object with `write(step, values)`. `run()` and `collect()` pass it the logs of each step that has
            logs, together with the environment steps of this Actor. None writes no logs.
        budget: environment steps that `run()` may take before a call of `allow` raises the budget. A restarted Actor
            starts with a budget of 0, because only the monitor has the step count of the previous Actor.
        incarnation: continue as this incarnation of `rank`, whose open fragments are in a restored buffer. None claims
            the rank.

    Attributes:
        rank: rank of this Actor.
        incarnation: incarnation of this Actor.
        num_envs: number of environments in all pools.
    """

    def __init__(
        self,
        env_builder: Any,
        inferencer: Inference | Any,
        replay_buffer: ReplayWriter | Any,
        rank: int | None = None,
        *,
        seed: int = 0,
        num_pools: int = 1,
        deadline: float = handles.DEADLINE,
        logger: Any = None,
        budget: float = math.inf,
        incarnation: int | None = None,
    ) -> None:
        if num_pools < 1 or (num_pools > 1 and not callable(env_builder)):
            raise UsageError(f"num_pools={num_pools} needs an env_builder that can be called once for each pool.")
        self._stop, self._run_has_ended = threading.Event(), threading.Event()
        self._logger = logger
        self._steppers: list[SyncStepper | AsyncStepper] = []  # one stepper for each pool
        self._has_reset = False  # True after the first call of `_reset`
        self._max_staleness: int | None = None  # `max_staleness` of the replay, set by `_reset`

        # Claim the rank first: the environment seeds and the choice of the inferencer depend on it.
        def find_inferencer(number: int) -> Any:
            return handles.resolve(inferencer, "inferencer", deadline=deadline, stop=self._stop, first=number)

        target = handles.resolve(replay_buffer, "replay buffer", deadline=deadline, stop=self._stop)
        self._replay = ActorReplay(target, lambda: find_inferencer(rank or 0).specs(), rank, incarnation)
        self.rank, self.incarnation = self._replay.rank, self._replay.incarnation
        try:
            # Before the first step, only the inferencer's specs are read.
            # The constructor of a node must not wait for another node.
            self._inferencer = as_inference(find_inferencer(self.rank))
            self._make_steppers(env_builder, num_pools, seed, deadline)
            self._replay.open_segment(self.num_envs)
        except BaseException:
            self.close()
            raise
        is_first = self.incarnation == 0 or budget == math.inf
        self._budget = StepBudget(budget if is_first else 0, self.num_envs, lambda: self.env_steps)

    def _make_steppers(self, env_builder: Any, num_pools: int, seed: int, deadline: float) -> None:
        """Create the pools and a stepper for each pool. The environments are numbered across all pools."""
        self.num_envs = 0
        for number in range(num_pools):
            parts = (seed, self.rank, self.incarnation, number)
            pool_seed = env_seed(*(parts if number else parts[:3]))
            env = as_pool(env_builder, seed=pool_seed, deadline=deadline, stop=self._stop)
            env_ids = global_env_ids(self.rank, self.num_envs + np.arange(env.num_envs))
            kind = SyncStepper if env.is_sync else AsyncStepper
            self._steppers.append(kind(env, env_ids, self._replay.writer))
            self.num_envs += env.num_envs

    @property
    def env_steps(self) -> int:
        """Number of environment steps. The step after LAST is not counted, because it only resets the environment."""
        return sum([stepper.episodes.env_steps for stepper in self._steppers])

    @property
    def episodes(self) -> int:
        """Number of episodes that ended."""
        return sum(stepper.episodes.episodes for stepper in self._steppers)

    def stats(self) -> dict[str, Any]:
        """Return the counters of this Actor. Any thread may call it.

        The counters start at 0. After `set_state`, `env_steps` and `episodes` continue from the restored values.

        Returns:
            A dict with `rank`, `incarnation`, `env_steps`, `episodes`, `return_sum` and `length_sum` (sums over the
            episodes that ended), and `logged`. `logged` is a dict with [sum, count] for each name of a value in the
            logs of the environments.
        """
        names = ("env_steps", "episodes", "return_sum", "length_sum")
        counts = {name: sum(getattr(stepper.episodes, name) for stepper in self._steppers) for name in names}
        logged = add_sums(stepper.env.sums() for stepper in self._steppers if hasattr(stepper.env, "sums"))
        return {"rank": self.rank, "incarnation": self.incarnation, **counts, "logged": logged}

    def allow(self, incarnation: int, env_steps: float) -> dict[str, Any]:
        """Set the total budget of `run()` to `env_steps`. Return the `stats()` from before this change.

        A call for another incarnation changes nothing. When the budget is used up, the Actor waits for the next call.
        Any thread may call this method.
        """
        stats = self.stats()
        if incarnation == self.incarnation:
            self._budget.allow(env_steps)
        return stats

    def step(self) -> Logs | None:
        """Step every environment once. An asynchronous pool steps only the environments that are ready.

        Returns:
            Logs of the episodes that ended with this step: `episode_return` and `episode_length` (means) and `episodes`
                (a count). None if no episode ended.

        Raises:
            EnvError: an environment raised an exception, or its process died.
            PeerError: a called node did not respond within the deadline.
        """
        if not self._has_reset:
            self._reset()
        logs = None
        for stepper in self._steppers:
            request = stepper.next_request()
            logs = merge_logs(logs, stepper.act(request, *self._inferencer.inference(*request)))
        return logs

    def run(self) -> None:
        """Step until `stop()` is called.

        With an on-policy replay (`ReplaySpec.max_staleness`), the Actor waits for newer parameters after each unroll.
        `step` never waits, because a loop that calls the Actor and the Learner in turn does not need to wait.

        In a node of a program, `run` returns when the program stops, and closes the environments.
        """
        with handles.stop_with_program(self.stop):
            try:
                self._prepare_run()
                if isinstance(self._inferencer, handles.Remote):
                    self._run_overlapped()
                else:
                    self._run_until(math.inf, math.inf)
            except StoppedError:
                pass
            finally:
                if handles.program_stop_event() is not None:
                    self.close()
                self._run_has_ended.set()

    def warm_up(self) -> None:
        """Reset the environments and call the inferencer once, so that the first step compiles nothing.

        No environment is stepped. With asynchronous pools, the first step still compiles.
        """
        self._prepare_run()
        for stepper in self._steppers:
            if isinstance(stepper, SyncStepper):
                self._inferencer.inference(*stepper.newest_timestep())

    def collect(self, steps: int = 0, seconds: float = math.inf) -> bool:
        """Step for a limited number of steps or seconds. Otherwise like `run`. May be called repeatedly.

        Args:
            steps: minimum number of environment steps, unless the time limit is reached first. 0 means no limit.
            seconds: no step starts after this time. A step that has started is completed (see `is_adding`).

        Returns:
            True if the Actor was still waiting at the end: for newer parameters, or for free space in the buffer.
        """
        self._prepare_run()
        try:
            return self._run_until(self.env_steps + steps if steps else math.inf, time.monotonic() + seconds)
        except StoppedError:
            return True

    @property
    def is_adding(self) -> bool:
        """True while a step is being added to the buffer. Adding takes long if the buffer is full. Thread-safe."""
        return any(stepper.is_adding for stepper in self._steppers)

    def stop(self) -> None:
        """End `run()` and `collect()` after the current step, now and in later calls. Any thread may call it.

        A step that waits for free space in the buffer is dropped.
        """
        self._stop.set()
        self._replay.end_waits()

    def stop_and_close(self, seconds: float = 10.0) -> None:
        """Stop `run()`, wait until it ends, and close the environments. Any thread may call it.

        Args:
            seconds: maximum time to wait. If `run()` takes longer, the environments stay open.
        """
        self.stop()
        if self._run_has_ended.wait(seconds):
            self.close()

    def close(self) -> None:
        """Stop `run()` and close the environments."""
        self.stop()
        for stepper in self._steppers:
            stepper.env.close()
        self._replay.release()

    def get_state(self, *, with_envs: bool = True) -> dict[str, Any]:
        """Return the state that a resumed Actor with one pool needs, as numpy arrays, ints and bytes.

        `env` is None if the environments cannot save their state, or if `with_envs` is False (after a failure). A
        resumed Actor then resets the environments.
        """
        return self._only_stepper().get_state(with_envs)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `get_state`. Call it before the first `step`."""
        self._only_stepper().set_state(state)

    def _reset(self) -> None:
        """Reset the environments unless their state was restored. Create the gates if the replay is on-policy."""
        first = self.rank * self.num_envs  # index of this Actor's first environment, counted over all Actors
        states, end = self._initial_state(first + self.num_envs), first
        for stepper in self._steppers:
            begin, end = end, end + stepper.env.num_envs
            stepper.begin(jax.tree.map(lambda leaf, begin=begin, end=end: np.array(leaf[begin:end]), states))
        spec = self._replay.spec(self._inferencer)
        if spec is not None and spec.max_staleness is not None:
            self._max_staleness = spec.max_staleness
            for stepper in self._steppers:
                stepper.gate = UnrollGate(spec) if isinstance(stepper, SyncStepper) else None
        self._has_reset = True

    def _initial_state(self, batch_size: int) -> AgentState:
        try:
            return self._inferencer.initial_state(batch_size)
        except NoMethodError:  # the node only has `inference`
            self._inferencer = StatelessInference(self._inferencer)
            return self._inferencer.initial_state(batch_size)

    def _prepare_run(self) -> None:
        """Reset the environments if needed. Raise UsageError for asynchronous pools with an on-policy replay."""
        if not self._has_reset:
            self._reset()
        if self._max_staleness is not None and any(isinstance(each, AsyncStepper) for each in self._steppers):
            raise UsageError(
                "The environments of an AsyncEnv complete their unrolls at different times, so they cannot "
                f"wait together for the next version, as max_staleness={self._max_staleness} requires. Use a "
                "SyncEnv (with an inference service, num_pools=2 keeps one pool busy while the other one waits), or "
                "an off-policy agent such as IMPALA."
            )

    def _run_until(self, env_steps: float, until: float) -> bool:
        """Step until `env_steps` steps were taken, or until the time `until`. Return True if a gate is closed."""
        has_end = env_steps < math.inf or until < math.inf
        while not self._stop.is_set():
            if has_end and (self.env_steps >= env_steps or time.monotonic() >= until):
                break
            if not self._budget.take():
                self._budget.wait()
                continue
            for gate in self._gates():
                if gate.is_closed:
                    gate.wait_until_open(self._inferencer, self._stop, until)
                    if gate.is_closed:
                        return True
            self._write(self.step())
        return False

    def _run_overlapped(self) -> None:
        """Step some environments while an inferencer in another process computes the actions of other environments.

        Each iteration does the first action of this list that is possible:

        1. Request the actions of a pool whose timestep is available.
        2. If all pools wait for newer parameters, wait for them.
        3. If no response has arrived, wait for environments of an asynchronous pool.
        4. Act on the oldest response, and wait for it if necessary.
        """
        pending: collections.deque[_PendingCall] = collections.deque()  # oldest first
        while not self._stop.is_set():
            steppers = self._steppers if self._budget.take() else []
            if not steppers and not pending:
                self._budget.wait()
                continue
            free = next((each for each in steppers if each.has_request), None)
            if free is None and not pending and (closed := [gate for gate in self._gates() if gate.is_closed]):
                self._open_together(closed)
                continue
            if free is None and not (pending and pending[0].call.done()):
                free = next((each for each in steppers if each.can_wait), None)
            if free is not None:
                request = free.next_request()
                pending.append(_PendingCall(free, request, handles.AsyncCall(self._inferencer, "inference", request)))
            else:
                stepper, request, call = pending.popleft()
                self._write(stepper.act(request, *call.result()))

    def _open_together(self, gates: list[UnrollGate]) -> None:
        """Wait until the newest version is new enough for at least one gate. Open all gates that accept this version.

        All pools must continue with the same version. Otherwise the learner would wait for the other pools.
        """
        oldest = min(gates, key=lambda gate: gate.too_old)
        version = oldest.wait_until_open(self._inferencer, self._stop)
        for gate in gates:
            gate.open_for(version)

    def _gates(self) -> list[UnrollGate]:
        return [each.gate for each in self._steppers if each.gate is not None]

    def _write(self, logs: Logs | None) -> None:
        if logs is not None and self._logger is not None:
            self._logger.write(self.env_steps, logs)

    def _only_stepper(self) -> SyncStepper | AsyncStepper:
        if len(self._steppers) > 1:
            raise UsageError(f"An Actor with {len(self._steppers)} pools cannot save its state. Use num_pools=1.")
        return self._steppers[0]


class _PendingCall(NamedTuple):
    """A call to an inferencer. Its response has not been used yet."""

    stepper: SyncStepper | AsyncStepper
    request: InferenceRequest
    call: handles.AsyncCall
