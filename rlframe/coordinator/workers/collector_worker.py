"""The worker that collects experience."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rlframe import handles
from rlframe.actors import Actor
from rlframe.coordinator.messages import (
    CallRefused,
    Collected,
    Failed,
    GetData,
    Header,
    NotReady,
    Started,
    StartTask,
    WaitsFor,
)
from rlframe.coordinator.param_store import ParamStore
from rlframe.coordinator.workers.overrides import (
    FixedParamsAgent,
    check_accepts_env_kwargs,
    policy_overrides,
    with_config,
)
from rlframe.coordinator.workers.task_worker import TaskWorker
from rlframe.errors import StoppedError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.phases import waiting_for
from rlframe.params.reader import ParamReader

_POLL = 0.2  # maximum seconds of one wait for the param store


class CollectorWorker(TaskWorker):
    """A worker that collects with an `Actor` and its own inferencer. The parameters come from the param store.

    The overrides of a `collect` task have two sections: `collector` fixes numbers among the actor's parameters (see
    `FixedParamsAgent`), and `env` sets options of the environments.

    Args:
        make_actor: A function `f(inferencer, rank)` that returns the Actor of a task. The rank is the worker's index,
            so a replacement takes over the exploration and the place in the buffer. The function receives the overrides
            in `env`, if there are any, as `env_kwargs=`.
        agent: The `Agent` that acts.
        param_store: A `ParamStore`, or a handle to one.
        worker_id, index, incarnation: See `TaskWorker`.
        seed: Seed of the actions.
    """

    kind = "collect"

    def __init__(
        self,
        make_actor: Callable[..., Actor],
        agent: Any,
        param_store: ParamStore | Any,
        worker_id: str,
        index: int,
        incarnation: int,
        *,
        seed: int = 0,
    ) -> None:
        self._make_actor, self._agent, self._seed = make_actor, agent, seed
        self._store = handles.resolve(param_store, "param store")
        self._actor: Actor | None = None
        self._began = time.monotonic()  # time at which the Actor's warm-up ended
        self._inferencer: Inferencer | None = None
        super().__init__(worker_id, index, incarnation)

    def get_data(self, header: Header, request: GetData) -> Collected | NotReady | CallRefused | Failed:
        """Step the environments for a while, and return the counters."""
        return self._call(header, "get_data", lambda: self._collect(request))

    def _start_task(self, task: StartTask) -> Started:
        env, acts_by = task.overrides.get("env", {}), task.overrides.get("collector", {})
        if env:
            check_accepts_env_kwargs(self._make_actor, env)
        source = ParamReader(self._store, task.policy_id)
        self._wait_for_params(source)
        agent: Any = with_config(self._agent, policy_overrides(self._store.get(task.policy_id)))
        agent = agent.with_inner(lambda inner: FixedParamsAgent(inner, acts_by)) if acts_by else agent
        self._inferencer = Inferencer(InferencerConfig(seed=self._seed), agent, source)
        self._actor = actor = self._make_actor(self._inferencer, self.index, **({"env_kwargs": env} if env else {}))
        if self._stop.is_set():
            actor.stop()
        actor.warm_up()
        version, self._began = self._inferencer.params_version, time.monotonic()
        return Started({"params_version": version, "rank": actor.rank, "num_envs": actor.num_envs})

    def _wait_for_params(self, source: ParamReader) -> None:
        self._waits_for = "params"
        with waiting_for("the first parameters"):
            while source.wait_for_version(-1, _POLL) < 0:
                if self._stop.is_set():
                    raise StoppedError(f"{self.worker_id} was stopped while it waited for the first parameters.")
        self._waits_for = None

    def _collect(self, request: GetData) -> Collected:
        actor, inferencer = self._actor, self._inferencer
        assert actor is not None and inferencer is not None
        before = actor.env_steps
        waits = actor.collect(request.steps, request.seconds)
        stats = actor.stats()
        return Collected(stats, inferencer.params_version, waits, stats["env_steps"] - before)

    def _waiting_for(self) -> WaitsFor | None:
        actor = self._actor
        return "data" if actor is not None and actor.is_adding else self._waits_for

    def _interrupt(self) -> None:
        actor = self._actor
        if actor is not None:
            actor.stop()

    def _close_task(self, final: bool) -> dict[str, Any]:
        actor, self._actor, self._inferencer = self._actor, None, None
        if actor is None:
            return {}
        stats, seconds = actor.stats(), time.monotonic() - self._began
        actor.close()
        return {**stats, "env_steps_per_second": stats["env_steps"] / max(seconds, 1e-9)}
