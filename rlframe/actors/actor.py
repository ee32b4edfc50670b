"""The Actor: a pool of environments, the recurrent state of each, and one step of them all."""

from __future__ import annotations

import collections
import math
import threading
import time
from typing import Any

import jax
import numpy as np

from rlframe import handles
from rlframe.actors.lanes import make_lane
from rlframe.actors.pace import Pace
from rlframe.actors.writing import OnlyAdds, claim_rank
from rlframe.envs import as_pool
from rlframe.errors import NoMethodError, StoppedError, UsageError
from rlframe.inferencers.base import Inference, StatelessInference, as_inference
from rlframe.inferencers.shared_calls import InferencerClient
from rlframe.metrics.sums import add_up
from rlframe.replay import BaseReplayBuffer, ReplayWriter, as_replay_buffer
from rlframe.types import AgentOutput, AgentState, Logs, global_env_ids

_LOOK = 0.1  # seconds between two looks at whether it is to stop, while it may not go on


class Actor:
    """Steps its environments with an inferencer's actions and adds what happened to a replay buffer.

    Args:
        env_builder: an environment pool, one gymnasium or dm_env environment, or a callable that gives
            one of these; it gets `seed=`, drawn from (seed, rank, incarnation), where it takes that. Or a handle to an
            `EnvServer`, whose seed is its own, or a list of handles to several, each of an `AsyncEnv`.
        inferencer: an `Inference`, or anything with `inference(env_ids, timestep)` alone; a handle to a node that is
            one; or a list of handles to several. Of these the Actor calls number `rank` (modulo how many there are),
            and the others while that one does not answer.
        replay_buffer: a `ReplayWriter`, or anything with `add(env_ids, step)` alone; a handle to it; or a
            `reverb.Client`, for which the inferencer's `specs()` say what the items are.
        rank: which actor this is, from 0; None claims the next free rank of the buffer. A buffer that has only `add`
            hands out no ranks: then each of several Actors needs a rank, and so does one in a node of a program.
        seed: of the whole run.
        num_pools: how many pools to build. With two synchronous ones, `run()` steps one while an inferencer in
            another process answers for the other.
        deadline: seconds that a node which this one calls may be out of reach.
        logger: anything with `write(step, values)`, which `run()` and `collect()` give the logs of each step that has
            any, by the environment steps of this Actor; None logs nothing.
        budget: environment steps that `run()` may take before it is given more, by `allow`. One that was restarted
            begins with none: what the one before it took, only who counts knows.
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
    ) -> None:
        if num_pools < 1 or (num_pools > 1 and not callable(env_builder)):
            raise UsageError(f"num_pools={num_pools} needs an env_builder that can be called for each of them.")
        self._stop, self._logger = threading.Event(), logger
        self._has_run = threading.Event()  # `run` has returned
        given = handles.resolve(replay_buffer, "replay buffer", deadline=deadline, stop=self._stop)

        def specs() -> Any:
            return handles.resolve(
                inferencer, "inferencer", deadline=deadline, stop=self._stop, first=rank or 0
            ).specs()

        replay_buffer = as_replay_buffer(given, specs)
        self._made_buffer = replay_buffer is not given
        self._lanes: list[Any] = []
        self._begun = False
        self._max_staleness: int | None = None  # of the replay; known when the first step begins
        self._paces: dict[Any, Pace] = {}
        self._taken, self._allowed = 0, threading.Event()
        self._is_ready = False
        replay_buffer, self.rank, self.incarnation = claim_rank(replay_buffer, rank)
        self._replay_buffer = replay_buffer
        # Environment steps that it may take in all; and that it has taken at most, which is cheaper than `env_steps`.
        self._limit = budget if self.incarnation == 0 or budget == math.inf else 0
        try:
            # It is not called before the first step, but for specs: a node's constructor does not wait for another's.
            self._inferencer = as_inference(
                handles.resolve(
                    inferencer, "inferencer", deadline=deadline, stop=self._stop, first=self.rank, wrap=InferencerClient
                )
            )
            for number in range(num_pools):
                parts = (seed, self.rank, self.incarnation, number)
                drawn = env_seed(*(parts if number else parts[:3]))
                env = as_pool(env_builder, seed=drawn, deadline=deadline, stop=self._stop)
                env_ids = global_env_ids(self.rank, self.num_envs + np.arange(env.num_envs))
                self._lanes.append(make_lane(env, env_ids, replay_buffer))
            self._size = self.num_envs
            replay_buffer.open_segment(self.rank, self.num_envs)
            self._is_ready = True
        except BaseException:
            self.close()
            raise

    @property
    def env_steps(self) -> int:
        """Steps that environments took; a step whose action was ignored (after LAST) is not one."""
        return sum(lane.episodes.env_steps for lane in self._lanes)

    @property
    def episodes(self) -> int:
        """Episodes that ended."""
        return sum(lane.episodes.episodes for lane in self._lanes)

    @property
    def num_envs(self) -> int:
        """Environments in the pools."""
        return sum(lane.env.num_envs for lane in self._lanes)

    def stats(self) -> dict[str, Any]:
        """Counters since this Actor was made: env_steps, episodes, return_sum, length_sum; logged; rank, incarnation.

        Any thread may ask. The sums are over the episodes that ended; what the environments logged is by its name
        [sum, count].
        """
        names = ("env_steps", "episodes", "return_sum", "length_sum")
        counts = {name: sum(getattr(lane.episodes, name) for lane in self._lanes) for name in names}
        logged = add_up(lane.env.sums() for lane in self._lanes if hasattr(lane.env, "sums"))
        return {"rank": self.rank, "incarnation": self.incarnation, **counts, "logged": logged}

    def allow(self, incarnation: int, env_steps: float) -> dict[str, Any]:
        """Lets `run()` go on until `env_steps` are that many, if this is that incarnation. Returns `stats()` before.

        Who has given no such leave for a while (a monitor that died, or hangs) has the Actor wait where the last ends.
        Any thread may call it.
        """
        stats = self.stats()
        if incarnation == self.incarnation:
            self._limit = env_steps
            self._allowed.set()
        return stats

    def step(self) -> Logs | None:
        """One step of every environment (of those that are ready, if the pool is asynchronous).

        Returns:
            `episode_return`, `episode_length` (means) and `episodes` (how many) of the episodes that
            ended with this step; None if none did.

        Raises:
            EnvError: an environment raised, or its process died.
            PeerError: a node that it calls did not answer within the deadline.
        """
        if not self._begun:
            self._begin()
        logs = None
        for lane in self._lanes:
            request = lane.ask()
            output, state = self._inferencer.inference(*request)
            logs = _merge(logs, self._act(lane, request, output, state))
        return logs

    def run(self) -> None:
        """Steps until `stop()`: the Actor as a service.

        For an on-policy replay (`ReplaySpec.max_staleness`) it waits after each unroll for newer parameters. `step`
        never waits: who calls it and the learner in turn has no need to.

        On a node of a Launchpad program the end of the program ends it too, and it closes the environments.
        """
        with handles.stopped_by_program(self.stop):
            try:
                self._begin_with_pace()
                if isinstance(self._inferencer, handles.Remote):
                    self._run_overlapped()
                else:
                    self._run_until(math.inf, math.inf)
            except StoppedError:
                pass
            finally:
                if handles.program_stop() is not None:
                    self.close()
                self._has_run.set()

    def warm_up(self) -> None:
        """Resets the environments and has the inferencer answer once, so that the first step compiles nothing.

        It changes no environment. Asynchronous pools answer only when they were asked: theirs compiles in `step`.
        """
        self._begin_with_pace()
        for lane in self._lanes:
            if lane.can_ask:
                self._inferencer.inference(*lane.request())

    def collect(self, steps: int = 0, seconds: float = math.inf) -> bool:
        """Steps for a while, as `run` does; any number of calls follow each other.

        Args:
            steps: environment steps to take at least, where the time lasts; 0: until it is up.
            seconds: after which no further step begins. One that is under way ends first, see `is_adding`.

        Returns:
            Whether it waited at the end, for newer parameters or for room in the buffer.
        """
        self._begin_with_pace()
        try:
            return self._run_until(self.env_steps + steps if steps else math.inf, time.monotonic() + seconds)
        except StoppedError:
            return True

    @property
    def is_adding(self) -> bool:
        """Whether a step is just being added to the buffer. If it is for long: there is no room. Any thread may ask."""
        return any(lane.is_adding for lane in self._lanes)

    def stop(self) -> None:
        """Ends `run()` and `collect()`, all that come too, after the step under way, or where that waits for room.

        Any thread may call it.
        """
        self._stop.set()
        if self._made_buffer:
            self._replay_buffer.close()
        elif isinstance(self._replay_buffer, BaseReplayBuffer):
            self._replay_buffer.end_waits(self.rank)

    def end(self, seconds: float = 10.0) -> None:
        """Stops `run()`, and closes the environments once it has returned. Any thread may call it.

        Args:
            seconds: that `run()` has to return; where it takes longer, the environments stay open.
        """
        self.stop()
        if self._has_run.wait(seconds):
            self.close()

    def close(self) -> None:
        """Stops, and closes the environments."""
        self.stop()
        for lane in self._lanes:
            lane.env.close()
        if isinstance(self._replay_buffer, OnlyAdds):
            self._replay_buffer.release(was_ready=self._is_ready)

    def get_state(self, *, with_envs: bool = True) -> dict[str, Any]:
        """All that a resumed Actor of one pool needs: numpy, ints and bytes.

        `env` is None where the environments cannot save their state, or are not asked to because they
        have failed: a resumed Actor resets them.
        """
        return self._only_lane().get_state(with_envs)

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what `get_state` gave; call it before the first `step`."""
        self._only_lane().set_state(state)

    def _act(self, lane: Any, request: Any, output: AgentOutput, state: AgentState) -> Logs | None:
        if lane in self._paces:
            self._paces[lane].acted(output.params_version)
        return lane.act(request, output, state)

    def _begin(self) -> None:
        first = self.rank * self._size  # row k of the initial state is that of the program's environment k
        states, end = self._initial_state(first + self._size), first
        for lane in self._lanes:
            begin, end = end, end + lane.env.num_envs
            lane.begin(jax.tree.map(lambda leaf, begin=begin, end=end: np.array(leaf[begin:end]), states))
        buffer = self._replay_buffer
        is_remote = isinstance(buffer, handles.Remote)
        spec = self._inferencer.specs().replay_spec if is_remote else getattr(buffer, "spec", None)
        if spec is not None and spec.max_staleness is not None:
            self._max_staleness = spec.max_staleness
            self._paces = {lane: Pace(spec) for lane in self._lanes if lane.env.is_sync}
        self._begun = True

    def _initial_state(self, batch_size: int) -> AgentState:
        try:
            return self._inferencer.initial_state(batch_size)
        except NoMethodError:  # of a node that has `inference` alone
            self._inferencer = StatelessInference(self._inferencer)
            return self._inferencer.initial_state(batch_size)

    def _begin_with_pace(self) -> None:
        if not self._begun:
            self._begin()
        if any(lane not in self._paces for lane in self._lanes) and self._max_staleness is not None:
            raise UsageError(
                "The environments of an AsyncEnv complete their unrolls at different times, so they cannot "
                f"wait together for the next version, as max_staleness={self._max_staleness} asks. Use a "
                "SyncEnv (two, by num_pools=2, overlap with an inference service), or an agent that learns "
                "off-policy, as IMPALA does."
            )

    def _run_until(self, env_steps: float, until: float) -> bool:
        """Steps until `env_steps` were taken, or it is `until`, and returns whether it waited for parameters then."""
        has_end = env_steps < math.inf or until < math.inf
        while not self._stop.is_set():
            if has_end and (self.env_steps >= env_steps or time.monotonic() >= until):
                break
            if self._is_at_limit():
                self._wait_for_leave()
                continue
            for pace in self._paces.values():
                if pace.waits:
                    pace.wait(self._inferencer, self._stop, until)
                    if pace.waits:
                        return True
            self._write(self.step())
        return False

    def _run_overlapped(self) -> None:
        """Steps environments while the inferencer, in another process, answers for others."""
        in_flight: collections.deque[tuple[Any, Any, handles.Call]] = collections.deque()  # oldest first
        while not self._stop.is_set():
            lanes = [] if self._is_at_limit() else self._lanes
            if not lanes and not in_flight:
                self._wait_for_leave()
                continue
            lane = next((lane for lane in lanes if lane.can_ask and not self._waits(lane)), None)
            if lane is None and not in_flight and self._paces:
                # All that it frees go on together: one that went on alone would have the learner wait for the others.
                first = min((pace for pace in self._paces.values() if pace.waits), key=lambda pace: pace.too_old)
                version = first.wait(self._inferencer, self._stop)
                for pace in self._paces.values():
                    pace.release(version)
                continue
            if lane is None and not (in_flight and in_flight[0][2].done()):
                lane = next((lane for lane in lanes if lane.can_wait), None)
            if lane is not None:
                request = lane.ask()
                in_flight.append((lane, request, handles.Call(self._inferencer, "inference", request)))
            else:
                lane, request, call = in_flight.popleft()
                self._write(self._act(lane, request, *call.result()))

    def _write(self, logs: Logs | None) -> None:
        if logs is not None and self._logger is not None:
            self._logger.write(self.env_steps, logs)

    def _is_at_limit(self) -> bool:
        """Whether no further step may be taken; comes before each."""
        self._taken += self._size
        if self._taken < self._limit:
            return False
        self._taken = self.env_steps
        return self._taken >= self._limit

    def _wait_for_leave(self) -> None:
        self._allowed.clear()
        if self.env_steps >= self._limit:
            self._allowed.wait(_LOOK)

    def _waits(self, lane: Any) -> bool:
        return lane in self._paces and self._paces[lane].waits

    def _only_lane(self) -> Any:
        if len(self._lanes) > 1:
            raise UsageError(f"An Actor of {len(self._lanes)} pools cannot save its state: use one.")
        return self._lanes[0]


def env_seed(*parts: int) -> int:
    """A seed below 2^31 for a pool of environments, from (seed, rank, incarnation)."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)


def _merge(some: Logs | None, more: Logs | None) -> Logs | None:
    if some is None or more is None:
        return some if more is None else more
    episodes = some["episodes"] + more["episodes"]
    names = ("episode_return", "episode_length")
    means = {name: (some[name] * some["episodes"] + more[name] * more["episodes"]) / episodes for name in names}
    return {**means, "episodes": episodes}
