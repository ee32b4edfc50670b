"""The monitor of a program: it counts, writes the logs, evaluates, and says when the run is over."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from rlframe import handles
from rlframe.errors import PeerError, StoppedError
from rlframe.interprocess.progress import Phase
from rlframe.metrics.sums import env_means
from rlframe.programs.assemble import Evaluations
from rlframe.programs.census import Census
from rlframe.programs.door import Door
from rlframe.programs.experiment import peer_deadline
from rlframe.programs.run_dir import Result, RunDir
from rlframe.types import Logs

if TYPE_CHECKING:
    from rlframe.programs.topologies import Run

_log = logging.getLogger(__name__)

_LOOK_EVERY = 0.1  # seconds between two looks at actors and learner
_LOOKING = Phase("looking at the others", 300.0)
_FINISH_WITHIN = 3600.0  # seconds that the learner has for its last update and checkpoint, or to come back for them
_GUESTS_WITHIN = 3.0  # seconds that programs on other machines have to hear of the end


class Monitor:
    """Ends a run at its last step, with an evaluation of what was learned; `run()` returns then.

    It asks actors and learner how far they are, and never waits for an actor: one that is dead or paused does not hold
    it up. It may be restarted itself: what it counted is in the run directory.

    Args:
        run: the session.
        learner: a Learner, or a handle to one.
        actors: Actors, or handles to them.
    """

    def __init__(self, run: Run, learner: Any, actors: list[Any]) -> None:
        self._until, self._described, self._directory = run.until, run.described, RunDir(run.path)
        self._stop = threading.Event()
        self._learner = handles.resolve(learner, "learner", deadline=peer_deadline(self._described), stop=self._stop)
        self._ask_learner = handles.Poll(self._learner, "stats")
        self._tell_learner = handles.Poll(self._learner, "finish")
        self._actors = [_Led(actor) for actor in actors]
        self._evaluations = Evaluations(self._described, run.agent, self._learner)
        self._evaluation: _Evaluation | None = None  # under way
        self._census = Census(self._directory.progress, run.session)
        self._door = Door(run, settles=self._census.goes_on)
        self.admit, self.attend, self.leave = self._door.admit, self._door.attend, self._door.leave
        self._learner_stats: dict[str, Any] = {}  # what it said last; a monitor that has just restarted knows nothing
        self._began = run.began
        self._row_began, self._row_total = time.monotonic(), self._census.total()
        self._row_logged = self._census.logged()
        self._first: tuple[float, int] | None = None  # (when, how many) the first steps were seen
        self._last = (0.0, 0)  # the same at the end of training

    @property
    def env_steps(self) -> int:
        """Steps of all actors so far, those of earlier sessions included."""
        return int(self._census.total()["env_steps"])

    def run(self) -> None:
        """Watches until the session's last step (then the final policy is evaluated), or `stop()`."""
        at = self.env_steps
        self._census.try_to_save()
        self._logger = self._directory.open_logs(at)
        evaluation = None
        try:
            with handles.stopped_by_program(self.stop):
                took_all = self._watch()
                self._door.end()
                if took_all:
                    evaluation = self._finish()
        except StoppedError:
            pass
        finally:
            self._evaluations.stop()
            self._door.end()
            self._door.wait_for_guests(_GUESTS_WITHIN)
            self._census.save()
            self._logger.close()
        self._directory.write_result(self._result(evaluation).to_json())

    def stop(self) -> None:
        """Ends `run()`, without an evaluation. Any thread may call it."""
        self._stop.set()
        self._evaluations.stop()

    def _watch(self) -> bool:
        """Returns True when the last step was taken, False when it was stopped before."""
        described, at_start = self._described, self.env_steps
        row_due = self._next(described.row_every)
        # One that was due when a monitor before this one died, or was stopped, is due still.
        evaluation_due = _next(described.eval_every, self._census.evaluated)
        while not self._stop.wait(_LOOK_EVERY):
            with _LOOKING:
                self._look()
            now = self.env_steps
            if now > at_start and self._first is None:
                self._first = time.monotonic(), now
            self._last = time.monotonic(), now
            if now >= self._until:
                return True
            if now >= row_due:
                self._write_row()
                row_due = self._next(described.row_every)
            if self._evaluation is None and now >= evaluation_due:
                self._evaluation = _Evaluation(self._evaluations, now)
                evaluation_due = self._next(described.eval_every)
            elif self._evaluation is not None and self._evaluation.is_over:
                self._write_evaluation(self._evaluation)
                self._evaluation = None
        self._look()
        self._write_row()
        return False

    def _look(self) -> None:
        for stats in self._door.heard():
            self._census.add(stats)
        num_actors = len(self._actors) + self._door.num_actors
        share = math.ceil(max(0, self._until - self.env_steps) / max(1, num_actors))
        self._door.lead(share)
        for actor in self._actors:
            if (said := actor.lead(share)) is not None:
                self._census.add(said)
        self._learner_stats = self._ask_learner() or self._learner_stats

    def _finish(self) -> Logs:
        """Has the learner finish, and evaluates what it ends with."""
        self._learner_stats = finish(self._learner, self._stop)
        self._write_row()
        if self._learner_stats["learner_steps"] == 0:
            _log.warning(
                "No update was made in %d environment steps. Run for more steps, or let learning begin earlier.",
                self.env_steps,
            )
        if self._evaluation is not None:
            self._write_evaluation(self._evaluation)
        while True:
            evaluation = _Evaluation(self._evaluations, self.env_steps)
            while not evaluation.is_over:
                self._tell_learner()  # it may die and come back meanwhile, and would learn on
                evaluation.wait(_LOOK_EVERY)
            values = evaluation.result()
            evaluated, self._learner_stats = self._learner_stats, finish(self._learner, self._stop)
            if self._learner_stats["learner_steps"] == evaluated["learner_steps"]:
                self._write_evaluation(evaluation)
                return values
            _log.warning("The learner came back during the evaluation, and learned on: its end is evaluated again.")

    def _next(self, every: int) -> float:
        return _next(every, self.env_steps)

    def _write_row(self) -> None:
        now, total, before = time.monotonic(), self._census.total(), self._row_total
        new = {name: total[name] - before[name] for name in total}
        if not new["env_steps"]:
            return
        values: dict[str, Any] = {}
        if new["episodes"]:
            values["episode_return"] = new["return_sum"] / new["episodes"]
            values["episode_length"] = new["length_sum"] / new["episodes"]
            values["episodes"] = int(new["episodes"])
        logged = self._census.logged()
        values.update(env_means(logged, self._row_logged))
        values["steps_per_second"] = new["env_steps"] / max(now - self._row_began, 1e-9)
        values.update({name: value for name, value in self._learner_stats.items() if name != "finished"})
        values["wall_seconds"] = time.time() - self._began
        self._row_began, self._row_total, self._row_logged = now, total, logged
        self._logger.write(self.env_steps, values)
        self._census.try_to_save()

    def _write_evaluation(self, evaluation: _Evaluation) -> None:
        """Waits for it, and writes it; raises what it raised."""
        names, values = ("return_mean", "return_std", "length_mean", "episodes"), evaluation.result()
        self._logger.write(self.env_steps, {name: values[name] for name in names})
        self._census.evaluated = evaluation.began_at
        self._census.try_to_save()

    def _result(self, evaluation: Logs | None) -> Result:
        (began, first), (ended, last) = self._first or self._last, self._last
        return Result(
            env_steps=self.env_steps,
            learner_steps=self._learner_stats.get("learner_steps", 0),
            return_mean=evaluation["return_mean"] if evaluation else None,
            return_std=evaluation["return_std"] if evaluation else None,
            episodes=evaluation["episodes"] if evaluation else 0,
            steps_per_second=(last - first) / max(ended - began, 1e-9),
            wall_seconds=time.time() - self._began,
            params_version=self._learner_stats.get("params_version", 0),
            run_dir=str(self._directory.path),
        )


class _Led:
    """An actor that steps as far as the monitor lets it: while that is away, no more is taken than was to be.

    Args:
        actor: an Actor, or a handle to one.
    """

    def __init__(self, actor: Any) -> None:
        self._allow = handles.Poll(handles.resolve(actor, "actor"), "allow")
        self._incarnation, self._env_steps = -1, 0.0  # as it said last

    def lead(self, share: int) -> dict[str, Any] | None:
        """Lets it take so many steps beyond those that are known of; what it said of itself, where it answered."""
        stats = self._allow(self._incarnation, self._env_steps + share)
        if stats is not None:
            self._incarnation, self._env_steps = stats["incarnation"], stats["env_steps"]
        return stats


def finish(learner: Any, stop: threading.Event) -> dict[str, Any]:
    """Tells a learner to finish until it has; returns its stats.

    Raises:
        PeerError: it did not in time.
        StoppedError: `stop` was set before.
    """
    deadline = time.monotonic() + _FINISH_WITHIN
    while not (stats := learner.stats())["finished"]:
        learner.finish()
        if time.monotonic() > deadline:
            raise PeerError(f"The learner had not finished {_FINISH_WITHIN:g} s after it was told to.")
        if stop.wait(_LOOK_EVERY):
            raise StoppedError("Told to stop before the learner had finished.")
    return stats


def _next(every: int, after: int) -> float:
    """The next multiple of `every` environment steps; never, where that is 0."""
    return (after // every + 1) * every if every else math.inf


class _Evaluation:
    """An evaluation beside the watch.

    Args:
        evaluations: what makes it.
        began_at: environment steps that had been taken when it was begun.
    """

    def __init__(self, evaluations: Evaluations, began_at: int) -> None:
        self.began_at = began_at
        self._values: Logs | BaseException | None = None

        def run() -> None:
            try:
                self._values = evaluations.evaluate()
            except BaseException as error:
                self._values = error

        self._thread = threading.Thread(target=run, name="rlframe evaluation", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Waits until it is over, so long at most."""
        self._thread.join(seconds)

    def result(self) -> Logs:
        """Waits for it, and gives what `Evaluator.evaluate` gave, or raises what that did."""
        self._thread.join()
        if isinstance(self._values, BaseException):
            raise self._values
        assert self._values is not None
        return self._values
