"""The monitor of a program that trains a language model."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

from rlframe import handles
from rlframe.errors import EnvError, PeerError, StoppedError
from rlframe.programs.policies.evaluation import EvaluationOutcome
from rlframe.programs.policies.saved import wait_until_saved
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.session import Session
from rlframe.programs.training.monitor import Monitor
from rlframe.types import Logs

_EVALUATION_TIMEOUT = 600.0  # maximum seconds of an evaluation, including a restart of the environment
_REFRESH_TIMEOUT = 600.0  # maximum seconds to wait until the policy server has loaded the last policy


class LanguageMonitor(Monitor):
    """A monitor that counts the steps of the learner, and requests evaluations from an environment.

    Args:
        session: The session.
        learner: The Learner, or a handle to it.
        policy: The policy server, or a handle to it.
        environments: The environment nodes, or handles to them. The first one runs the evaluations.
    """

    def __init__(self, session: Session, learner: Any, policy: Any, environments: list[Any]) -> None:
        super().__init__(session, learner)
        resolve = functools.partial(handles.resolve, stop=self._stop)
        self._policy = resolve(policy, "policy server", deadline=session.peer_deadline)
        self._poll_policy = handles.Poller(self._policy, "stats")
        environment_handles = [resolve(each, "environment") for each in environments]
        self._poll_environments = [handles.Poller(each, "stats") for each in environment_handles]
        self._evaluator = environment_handles[0]
        self._learner_stats = {"learner_steps": 0, "params_version": 0}
        self._policy_stats: dict[str, Any] = {}  # newest stats of the policy server
        self._env_metrics: dict[int, dict[str, float]] = {}  # newest metrics of each environment, by rank
        self._row_tokens = 0.0
        self._warm_up_steps = session.topology_config.warm_up_steps(session.experiment)

    @property
    def step(self) -> int:
        """Learner steps so far, including the warm-up."""
        return int(self._learner_stats["learner_steps"]) + self._warm_up_steps

    def _prepare(self) -> None:
        self._learner_stats = self._learner.stats()
        if self._progress.evaluated is None:
            self._evaluation_schedule.due = self.step  # also evaluate before the first update

    def _is_done(self) -> bool:
        return self._learner_stats["learner_steps"] >= self._session.until

    def _poll_nodes(self) -> None:
        self._learner_stats = self._poll_learner() or self._learner_stats
        self._policy_stats = self._poll_policy() or self._policy_stats
        for poll in self._poll_environments:
            if (stats := poll()) is not None:
                self._env_metrics[stats["rank"]] = stats["metrics"]

    def _evaluate(self, *, final: bool) -> Logs:
        self._wait_for_policy()
        values = self._request_evaluation(final=final)
        if not final:
            wait_until_saved(self._learner, self._session.directory.checkpoints, self._stop)
        return values

    def _wait_for_policy(self) -> None:
        """If the learner has finished, wait until the policy server has loaded the learner's last policy."""
        deadline = time.monotonic() + _REFRESH_TIMEOUT
        while (
            self._learner_stats.get("finished")
            and self._policy.stats()["version"] < self._learner_stats["params_version"]
        ):
            if time.monotonic() > deadline:
                raise PeerError(
                    f"The policy server did not load the learner's last policy within {_REFRESH_TIMEOUT:g} s."
                )
            self._pause("the policy server loaded the last policy")

    def _request_evaluation(self, *, final: bool) -> Logs:
        """Request an evaluation from the first environment, and return its values."""
        # The number is the current time, so that it differs from the numbers of all earlier evaluations.
        number, deadline = time.time_ns(), time.monotonic() + _EVALUATION_TIMEOUT
        while time.monotonic() < deadline:
            answer = None
            try:
                answer = self._evaluator.evaluate(number)
            except StoppedError:
                raise
            except PeerError as error:
                if not final:  # in the final evaluation, wait until the environment is restarted
                    raise EnvError("the environment did not answer") from error
            if answer is not None:
                if isinstance(answer[1], str):
                    raise EnvError(answer[1])
                return answer[1]
            self._pause("the evaluation was complete")
        raise EnvError(f"the evaluation took more than {_EVALUATION_TIMEOUT:g} s")

    def _values(self) -> dict[str, Any]:
        values = super()._values()
        if "reward" in values:
            values["episode_return"], values["episode_length"] = values["reward"], values.get("length", math.nan)
        tokens = self._learner_stats.get("replay_steps", 0.0)
        values["tokens_per_second"] = max(0.0, tokens - self._row_tokens) / self._rows.seconds
        self._row_tokens = tokens
        for rank, metrics in self._env_metrics.items():
            prefix = f"env_{rank}/" if len(self._poll_environments) > 1 else ""
            values.update({f"{prefix}{name}": value for name, value in metrics.items()})
        return {**values, **{f"policy_{name}": value for name, value in self._policy_stats.items()}}

    def _evaluation_row(self, values: Logs) -> dict[str, Any]:
        return {"return_mean": _first_value(values), **values, "wall_seconds": time.time() - self._session.began}

    def _result(self, evaluation: EvaluationOutcome, stopped_by: str) -> Result:
        metrics, sequences = evaluation.values, self._experiment.agent_config.batch_size
        return self._rows.result(
            self._learner_stats["learner_steps"] * sequences,
            self._learner_stats,
            evaluation._replace(values={"return_mean": _first_value(metrics)} if metrics else None),
            stopped_by,
            steps_per_row_step=sequences,
            metrics=metrics,
        )


def _first_value(metrics: Logs) -> float:
    return next(iter(metrics.values()))
