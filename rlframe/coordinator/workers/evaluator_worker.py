"""The worker that evaluates versions of the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rlframe import handles
from rlframe.coordinator.messages import CallRefused, Evaluated, Failed, GetData, Header, NotReady, Started, StartTask
from rlframe.coordinator.param_store import ParamStore
from rlframe.coordinator.workers.overrides import policy_overrides, with_config
from rlframe.coordinator.workers.task_worker import TaskWorker
from rlframe.errors import UsageError
from rlframe.params.publication import LocalParams
from rlframe.types import Logs

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
