"""The worker that steps environments: it collects experience, or evaluates a version of the policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from rlframe import handles
from rlframe.actors import Actor
from rlframe.coordinator.messages import Collected, Evaluated, GetData, NotReady, Started, StartTask, WaitsFor
from rlframe.coordinator.param_store import ParamStore, StoredParams
from rlframe.coordinator.workers.overrides import ActsBy, check_takes_env_kwargs, with_config
from rlframe.coordinator.workers.task_worker import TaskWorker
from rlframe.errors import StoppedError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.phases import waiting_for
from rlframe.params.publication import LocalParams
from rlframe.params.reader import ParamReader
from rlframe.types import Logs

_POLL = 0.2  # seconds that the param store is waited for at once

_EVALUATION = ("return_mean", "return_std", "length_mean", "episodes")


class VersionGoneError(UsageError):
    """The version to evaluate is not in the param store, or no longer."""


class VersionEvaluator(Protocol):
    """Evaluates by the newest parameters of the learner that it was made with, the same way each time."""

    @property
    def steps(self) -> int:
        """Environment steps so far, which rise during an evaluation."""

    def evaluate(self) -> Logs:
        """As `Evaluator.evaluate`."""

    def stop(self) -> None:
        """End the evaluation under way, and all later ones, with StoppedError. Any thread may call it."""


class CollectorWorker(TaskWorker):
    """Collects with an `Actor` and its own inferencer, by the parameters in the param store; or evaluates.

    What is built for an evaluation, compiled code above all, serves the next one too. Evaluations add to no buffer.

    A `collect` task's overrides `collector` are numbers to act by (see `ActsBy`), `env` options of the environments.

    Args:
        make_actor: `f(inferencer, rank)` gives the Actor of a `collect` task; the rank is the worker's index, so that a
            replacement takes its exploration and its place in the buffer. Where the task has overrides `env`, it gets
            them as `env_kwargs=`. None: this worker collects nothing.
        agent: the `Agent` that acts.
        param_store: a `ParamStore`, or a handle to one.
        worker_id, index, incarnation: see `TaskWorker`.
        seed: of the actions.
        evaluations: `f(agent, learner)` gives what evaluates. None: this worker evaluates nothing.
    """

    def __init__(
        self,
        make_actor: Callable[..., Actor] | None,
        agent: Any,
        param_store: ParamStore | Any,
        worker_id: str,
        index: int,
        incarnation: int,
        *,
        seed: int = 0,
        evaluations: Callable[[Any, Any], VersionEvaluator] | None = None,
    ) -> None:
        self._make_actor, self._make_evaluations = make_actor, evaluations
        self._agent, self._seed = agent, seed
        self._store = handles.resolve(param_store, "param store")
        self._actor: Actor | None = None
        self._began = time.monotonic()  # of its task, once it is warm
        self._inferencer: Inferencer | None = None
        self._one_version = LocalParams()
        self._evaluations: VersionEvaluator | None = None
        self._evaluated_policy: dict[str, Any] = {}  # hyper-parameters that those were made with
        self._evaluated: Evaluated | None = None
        self._is_evaluating = False
        if make_actor is not None and evaluations is not None:
            self.kinds = ("collect", "evaluate")
        else:
            self.kinds = ("collect",) if make_actor is not None else ("evaluate",)
        super().__init__(worker_id, index, incarnation)

    def _start_task(self, task: StartTask) -> Started:
        if task.kind == "evaluate":
            return self._start_evaluating(task)
        assert self._make_actor is not None
        env, acts_by = task.overrides.get("env", {}), task.overrides.get("collector", {})
        if env:
            check_takes_env_kwargs(self._make_actor, env)
        source = ParamReader(self._store, task.policy_id)
        self._wait_for_params(source)
        agent: Any = with_config(self._agent, _policy_of(self._store.get(task.policy_id)))
        agent = agent.with_inner(lambda inner: ActsBy(inner, acts_by)) if acts_by else agent
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
                    raise StoppedError(f"{self.worker_id} was told to stop while it waited for the first parameters.")
        self._waits_for = None

    def _start_evaluating(self, task: StartTask) -> Started:
        version = task.options["params_version"]
        found = self._store.get(task.policy_id, version=version)
        if found is None:
            there = ", ".join(str(one) for one in self._store.versions(task.policy_id)) or "none"
            raise VersionGoneError(
                f"Version {version} of policy {task.policy_id!r} cannot be evaluated: the param store has {there}. "
                "Pin a version until it is evaluated."
            )
        self._one_version.publish(found.version, found.packed)
        self._evaluated, self._is_evaluating = None, True
        policy = _policy_of(found)
        if self._evaluations is None or policy != self._evaluated_policy:
            assert self._make_evaluations is not None
            self._evaluations = self._make_evaluations(with_config(self._agent, policy), self._one_version)
            self._evaluated_policy = policy
        return Started({"params_version": version})

    def _get_data(self, request: GetData) -> Collected | Evaluated | NotReady:
        if self._is_evaluating:
            return self._evaluate()
        actor, inferencer = self._actor, self._inferencer
        assert actor is not None and inferencer is not None
        before = actor.env_steps
        waits = actor.collect(request.steps, request.seconds)
        stats = actor.stats()
        return Collected(stats, inferencer.params_version, waits, stats["env_steps"] - before)

    def _evaluate(self) -> Evaluated:
        if self._evaluated is None:
            assert self._evaluations is not None
            if self._stop.is_set():
                self._evaluations.stop()
            logs = self._evaluations.evaluate()
            self._evaluated = Evaluated(logs["params_version"], {name: float(logs[name]) for name in _EVALUATION})
        return self._evaluated

    def _waiting_for(self) -> WaitsFor | None:
        actor = self._actor
        return "data" if actor is not None and actor.is_adding else self._waits_for

    def _steps_within(self) -> int:
        evaluations = self._evaluations
        return evaluations.steps if evaluations is not None else 0

    def _interrupt(self) -> None:
        actor, evaluations = self._actor, self._evaluations
        if actor is not None:
            actor.stop()
        if evaluations is not None and self._is_evaluating:
            evaluations.stop()

    def _close_task(self, final: bool) -> dict[str, Any]:
        actor, self._actor, self._inferencer = self._actor, None, None
        if self._is_evaluating and self._stop.is_set():
            self._evaluations = None  # it was told to stop, and evaluates no more
        self._is_evaluating = False
        if actor is None:
            return {}
        stats, seconds = actor.stats(), time.monotonic() - self._began
        actor.close()
        return {**stats, "env_steps_per_second": stats["env_steps"] / max(seconds, 1e-9)}


def _policy_of(found: StoredParams | None) -> dict[str, Any]:
    """Return the hyper-parameters that the learner put beside the parameters."""
    return ((found.hparams if found is not None else None) or {}).get("policy", {})
