"""The monitor of a program in which a language model learns."""

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

_EVALUATE_WITHIN = 600.0  # seconds for an evaluation, with a restart of the environment
_REFRESH_WITHIN = 600.0  # seconds that the policy server has for the learner's last version


class LanguageMonitor(Monitor):
    """Counts the steps of the learner, and asks an environment to evaluate.

    Args:
        session: the session.
        learner, policy: nodes, or handles to them.
        environments: the same; the first one evaluates.
    """

    def __init__(self, session: Session, learner: Any, policy: Any, environments: list[Any]) -> None:
        super().__init__(session, learner)
        found = functools.partial(handles.resolve, stop=self._stop)
        self._policy = found(policy, "policy server", deadline=session.peer_deadline)
        self._poll_policy = handles.Poller(self._policy, "stats")
        asked = [found(each, "environment") for each in environments]
        self._poll_environments = [handles.Poller(each, "stats") for each in asked]
        self._evaluator = asked[0]
        self._learner_stats = {"learner_steps": 0, "params_version": 0}
        self._policy_stats: dict[str, Any] = {}  # the policy server's newest stats
        self._env_metrics: dict[int, dict[str, float]] = {}  # the environments' newest metrics, by rank
        self._row_tokens = 0.0
        self._warm_up_steps = session.topology_config.warm_up_steps(session.experiment)

    @property
    def step(self) -> int:
        """Learner steps so far, with those of the warm-up."""
        return int(self._learner_stats["learner_steps"]) + self._warm_up_steps

    def _begin(self) -> None:
        self._learner_stats = self._learner.stats()
        if self._progress.evaluated is None:
            self._evaluation_schedule.due = self.step  # before the first update, too

    def _is_done(self) -> bool:
        return self._learner_stats["learner_steps"] >= self._session.until

    def _poll_nodes(self) -> None:
        self._learner_stats = self._poll_learner() or self._learner_stats
        self._policy_stats = self._poll_policy() or self._policy_stats
        for ask in self._poll_environments:
            if (stats := ask()) is not None:
                self._env_metrics[stats["rank"]] = stats["metrics"]

    def _evaluate(self, *, final: bool) -> Logs:
        self._wait_for_policy()
        values = self._request_evaluation(final=final)
        if not final:
            wait_until_saved(self._learner, self._session.directory.checkpoints, self._stop)
        return values

    def _wait_for_policy(self) -> None:
        """Wait until the policy server has the last version of a learner that has finished."""
        deadline = time.monotonic() + _REFRESH_WITHIN
        while (
            self._learner_stats.get("finished")
            and self._policy.stats()["version"] < self._learner_stats["params_version"]
        ):
            if time.monotonic() > deadline:
                raise PeerError(
                    f"The policy server had not taken over the learner's last version within {_REFRESH_WITHIN:g} s."
                )
            self._pause("the policy server had taken over the last version")

    def _request_evaluation(self, *, final: bool) -> Logs:
        """Ask the first environment to evaluate, and return the values."""
        # From the clock: a number that an earlier monitor has used would name an earlier evaluation.
        number, deadline = time.time_ns(), time.monotonic() + _EVALUATE_WITHIN
        while time.monotonic() < deadline:
            answer = None
            try:
                answer = self._evaluator.evaluate(number)
            except StoppedError:
                raise
            except PeerError as error:
                if not final:  # after the training there is time for it to be started again
                    raise EnvError("the environment did not answer") from error
            if answer is not None:
                if isinstance(answer[1], str):
                    raise EnvError(answer[1])
                return answer[1]
            self._pause("the environment had evaluated")
        raise EnvError(f"it took more than {_EVALUATE_WITHIN:g} s")

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
