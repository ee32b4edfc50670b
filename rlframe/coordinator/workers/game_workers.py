"""Workers that play: `CollectorWorker` collects experience, and `EvaluatorWorker` evaluates the policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from rlframe import handles
from rlframe.actors import Actor
from rlframe.coordinator.messages import (
    CallRefused,
    Collected,
    Evaluated,
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
from rlframe.errors import StoppedError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.heartbeat import waiting_for
from rlframe.params.publication import LocalParams
from rlframe.params.reader import ParamReader
from rlframe.types import Logs

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


_LOG_NAMES = ("return_mean", "return_std", "length_mean", "episodes")


class VersionGoneError(UsageError):
    """The version to evaluate is not in the param store."""


class VersionEvaluator(Protocol):
    """An evaluator that uses the newest parameters of its learner. Each evaluation runs in the same way."""

    @property
    def steps(self) -> int:
        """Number of environment steps so far. The number rises during an evaluation."""

    def evaluate(self) -> Logs:
        """See `Evaluator.evaluate`."""

    def stop(self) -> None:
        """Make the current evaluation and all later evaluations raise StoppedError. Any thread may call it."""


class EvaluatorWorker(TaskWorker):
    """A worker that evaluates one version of a policy in each task. It adds no data to a replay buffer.

    The evaluator and its compiled code are reused in the next task.

    Args:
        make_evaluator: A function `f(agent, learner)` that returns a `VersionEvaluator`.
        agent: The `Agent` that acts.
        param_store: A `ParamStore`, or a handle to one.
        worker_id, index, incarnation: See `TaskWorker`.
    """

    kind = "evaluate"

    def __init__(
        self,
        make_evaluator: Callable[[Any, Any], VersionEvaluator],
        agent: Any,
        param_store: ParamStore | Any,
        worker_id: str,
        index: int,
        incarnation: int,
    ) -> None:
        self._make_evaluator, self._agent = make_evaluator, agent
        self._store = handles.resolve(param_store, "param store")
        self._version = LocalParams()  # source of the evaluator's parameters, which have the task's version
        self._evaluator: VersionEvaluator | None = None  # the evaluator, kept for the next task
        self._policy: dict[str, Any] = {}  # the evaluator's policy overrides
        self._running_evaluator: VersionEvaluator | None = None  # evaluator of the current task; None without a task
        self._result: Evaluated | None = None  # result of the task
        super().__init__(worker_id, index, incarnation)

    def get_data(self, header: Header, request: GetData) -> Evaluated | NotReady | CallRefused | Failed:
        """Run the whole evaluation, and return its result."""
        return self._call(header, "get_data", self._evaluate)

    def _start_task(self, task: StartTask) -> Started:
        version = task.options["params_version"]
        found = self._store.get(task.policy_id, version=version)
        if found is None:
            there = ", ".join(str(one) for one in self._store.versions(task.policy_id)) or "none"
            raise VersionGoneError(
                f"Version {version} of policy {task.policy_id!r} is not in the param store, so it cannot be evaluated. "
                f"Available versions: {there}. Pin a version until its evaluation ends."
            )
        self._version.publish(found.version, found.packed)
        policy = policy_overrides(found)
        if self._evaluator is None or policy != self._policy:
            self._evaluator = self._make_evaluator(with_config(self._agent, policy), self._version)
            self._policy = policy
        self._running_evaluator, self._result = self._evaluator, None
        return Started({"params_version": version})

    def _evaluate(self) -> Evaluated:
        if self._result is None:
            assert self._running_evaluator is not None
            if self._stop.is_set():
                self._running_evaluator.stop()
            logs = self._running_evaluator.evaluate()
            self._result = Evaluated(logs["params_version"], {name: float(logs[name]) for name in _LOG_NAMES})
        return self._result

    def _progress_count(self) -> int:
        evaluator = self._running_evaluator
        return evaluator.steps if evaluator is not None else 0

    def _interrupt(self) -> None:
        evaluator = self._running_evaluator
        if evaluator is not None:
            evaluator.stop()

    def _close_task(self, final: bool) -> dict[str, Any]:
        if self._running_evaluator is not None and self._stop.is_set():
            self._evaluator = None  # a stopped evaluator cannot be reused
        self._running_evaluator = None
        return {}
