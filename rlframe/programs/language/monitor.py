"""The monitor of a program in which a language model learns: it counts, has the model evaluated, and ends the run."""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from typing import Any

from rlframe import handles
from rlframe.errors import EnvError, PeerError, StoppedError
from rlframe.interprocess.files import write_atomically
from rlframe.programs.experiment import peer_deadline
from rlframe.programs.language.session import LanguageRun
from rlframe.programs.monitor import finish
from rlframe.programs.run_dir import Result, RunDir

_log = logging.getLogger(__name__)

_LOOK_EVERY = 0.1  # seconds between two looks at the nodes
_EVALUATE_WITHIN = 600.0  # seconds for an evaluation; the environment may be started again meanwhile
_REFRESH_WITHIN = 600.0  # seconds that the policy server has for the learner's last version


class LanguageMonitor:
    """Ends a run at its last learner step, with an evaluation of what was learned; `run()` returns then.

    It never waits for an environment while the learner learns. It may be restarted itself.

    Args:
        run: the session.
        learner, policy: nodes, or handles to them.
        environments: the same; the first one evaluates.
    """

    def __init__(self, run: LanguageRun, learner: Any, policy: Any, environments: list[Any]) -> None:
        self._run, self._described, self._directory = run, run.described, RunDir(run.path)
        self._stop = threading.Event()
        found = functools.partial(handles.resolve, deadline=peer_deadline(self._described), stop=self._stop)
        self._learner = found(learner, "learner")
        self._ask_learner = handles.Poll(self._learner, "stats")
        self._policy = found(policy, "policy server")
        self._ask_policy = handles.Poll(self._policy, "stats")
        asked = [handles.resolve(each, "environment", stop=self._stop) for each in environments]
        self._ask_environments = [handles.Poll(each, "stats") for each in asked]
        self._evaluator = asked[0]
        self._learned: dict[str, Any] = {"learner_steps": 0, "params_version": 0}  # the learner's newest stats
        self._served: dict[str, Any] = {}  # the policy server's
        self._collected: dict[int, dict[str, float]] = {}  # the environments' newest metrics, by rank
        self._evaluations = 0
        self._evaluation: dict[str, float] | None = None  # the newest
        self._row_began, self._row_tokens, self._row_step = time.monotonic(), 0.0, 0
        self._first: tuple[float, int] | None = None  # (when, learner steps) at the first look
        self._last = (0.0, 0)

    def run(self) -> None:
        """Watches until the session's last step (then the final policy is evaluated), or `stop()`."""
        finished = False
        try:
            with handles.stopped_by_program(self.stop):
                self._learned = self._learner.stats()
                at = self._row_step = self._step
                self._logger = self._directory.open_logs(at)
                try:
                    finished = self._watch()
                    if finished:
                        self._finish()
                finally:
                    self._logger.close()
        except StoppedError:
            pass
        self._directory.write_result(self._result(self._evaluation if finished else None).to_json())

    def stop(self) -> None:
        """Ends `run()`, without an evaluation. Any thread may call it."""
        self._stop.set()

    @property
    def _step(self) -> int:
        """Learner steps so far, those of the warm-up included."""
        return int(self._learned["learner_steps"]) + self._described.warmup_steps

    def _watch(self) -> bool:
        """Returns True when the last step was made, False when it was stopped before."""
        evaluated = self._read_evaluated()
        due: float = self._step if evaluated is None else _next(self._described.eval_every, evaluated)
        began: tuple[int, int, float] | None = None  # of an evaluation under way: number, step, when
        while not self._stop.wait(_LOOK_EVERY):
            self._look()
            now = self._step
            self._first = self._first or (time.monotonic(), now)
            self._last = time.monotonic(), now
            if self._learned["learner_steps"] >= self._run.until:
                return True
            if now >= self._row_step + self._described.log_every:
                self._write_row()
            if began is None and now >= due:
                began = self._next_evaluation(), now, time.monotonic()
                due = _next(self._described.eval_every, now)
            if began is not None and self._look_at_evaluation(*began):
                began = None
        self._look()
        self._write_row()
        return False

    def _look(self) -> None:
        self._learned = self._ask_learner() or self._learned
        self._served = self._ask_policy() or self._served
        for ask in self._ask_environments:
            if (stats := ask()) is not None:
                self._collected[stats["rank"]] = stats["metrics"]

    def _finish(self) -> None:
        """Has the learner finish, and evaluates what it ends with."""
        self._learned = finish(self._learner, self._stop)
        self._write_row()
        deadline = time.monotonic() + _REFRESH_WITHIN
        while self._policy.stats()["version"] < self._learned["params_version"]:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"The policy server had not taken over the learner's last version within {_REFRESH_WITHIN:g} s."
                )
            self._pause()
        number, step, began = self._next_evaluation(), self._step, time.monotonic()
        while not self._look_at_evaluation(number, step, began, must=True):
            self._learner.finish()  # it may die and come back meanwhile, and would learn on
            self._pause()

    def _pause(self) -> None:
        if self._stop.wait(_LOOK_EVERY):
            raise StoppedError("Told to stop before the final policy was evaluated.")

    def _next_evaluation(self) -> int:
        # By the clock: an environment that an earlier monitor has asked must not take it for the same one.
        self._evaluations = max(self._evaluations + 1, time.time_ns())
        return self._evaluations

    def _look_at_evaluation(self, number: int, step: int, began: float, must: bool = False) -> bool:
        """Whether it is done; then it is written."""
        try:
            answer = self._evaluator.evaluate(number)
        except PeerError:
            if must:
                raise
            answer = number, "the environment did not answer"
        if answer is None and time.monotonic() - began < _EVALUATE_WITHIN:
            return False
        found = answer[1] if answer is not None else f"it took more than {_EVALUATE_WITHIN:g} s"
        if isinstance(found, str):
            if must:
                raise EnvError(f"The final policy could not be evaluated: {found}")
            _log.warning("The evaluation at step %d failed: %s", step, found)
            return True
        self._evaluation = found
        first = _first_value(found)
        row = {"return_mean": first, **found, "wall_seconds": time.time() - self._run.began}
        self._logger.write(max(step, self._row_step), row)
        self._try_to_write_evaluated(step)
        return True

    def _write_row(self) -> None:
        now, step, tokens = time.monotonic(), self._step, self._learned.get("replay_steps", 0.0)
        if step == self._row_step:
            return
        seconds = max(now - self._row_began, 1e-9)
        values: dict[str, Any] = {name: value for name, value in self._learned.items() if name != "finished"}
        if "reward" in values:
            values["episode_return"], values["episode_length"] = values["reward"], values.get("length", math.nan)
        values["steps_per_second"] = (step - self._row_step) / seconds
        values["tokens_per_second"] = max(0.0, tokens - self._row_tokens) / seconds
        for rank, metrics in self._collected.items():
            prefix = f"env_{rank}/" if len(self._ask_environments) > 1 else ""
            values.update({f"{prefix}{name}": value for name, value in metrics.items()})
        values.update({f"policy_{name}": value for name, value in self._served.items()})
        values["wall_seconds"] = time.time() - self._run.began
        self._row_began, self._row_tokens, self._row_step = now, tokens, step
        self._logger.write(step, values)

    def _read_evaluated(self) -> int | None:
        """The learner step of the newest evaluation of this run; None before the first."""
        path = self._directory.progress
        return json.loads(path.read_text())["evaluated"] if path.exists() else None

    def _try_to_write_evaluated(self, step: int) -> None:
        try:
            write_atomically(self._directory.progress, json.dumps({"evaluated": step}), parents=True)
        except OSError as error:
            told = "Cannot write %s: %s. Make room: the next evaluation is another try."
            _log.warning(told, self._directory.progress, error.strerror)

    def _result(self, evaluation: dict[str, float] | None) -> Result:
        (began, first), (ended, last) = self._first or self._last, self._last
        sequences = self._described.agent_config.batch_size
        learned = self._learned["learner_steps"]
        return Result(
            env_steps=learned * sequences,
            learner_steps=learned + self._described.warmup_steps,
            return_mean=_first_value(evaluation) if evaluation else None,
            return_std=None,
            episodes=0,
            steps_per_second=(last - first) * sequences / max(ended - began, 1e-9),
            wall_seconds=time.time() - self._run.began,
            params_version=self._learned["params_version"],
            run_dir=str(self._directory.path),
            evaluation=evaluation,
        )


def _first_value(metrics: dict[str, float]) -> float:
    return next(iter(metrics.values()))


def _next(every: int, after: int) -> float:
    """The next multiple of `every` learner steps; never, where that is 0."""
    return (after // every + 1) * every if every else math.inf
