"""The Coordinator, which runs a job's state machine with real workers, a real operator and a real clock."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import handles
from rlframe.coordinator import status as statuses
from rlframe.coordinator.commander import Commander
from rlframe.coordinator.config import CoordinatorConfig, JobRecorder
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.machine import advance
from rlframe.coordinator.core.records import Rates
from rlframe.coordinator.journal import Journal
from rlframe.coordinator.messages import Role
from rlframe.coordinator.operators import Operator
from rlframe.coordinator.scaling import Scaling
from rlframe.coordinator.states import JobState, is_over
from rlframe.coordinator.threads import OperatorThread, ReplayThread
from rlframe.coordinator.worker_calls import WorkerCalls
from rlframe.errors import JobFailedError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.heartbeat import Phase, SuspendAwareClock
from rlframe.interprocess.waiting import Inbox
from rlframe.stop_conditions import StopReason

_log = logging.getLogger(__name__)

_TICK = 0.05  # seconds between two ticks
_JOURNAL_EVERY = 0.1  # seconds between two writes of the journal; a note is written at once
_JSON_SCALARS = (str, int, float, bool, type(None))  # the journal keeps only note fields of these types
_HANDLING = Phase("handling events", 300.0)
_JOURNAL_WITHIN = 1.0  # maximum seconds that a request waits for the journal
_CLOSE_WITHIN = 14.0  # additional seconds that `close` waits for the operator


class _JournaledMarker(threading.Event):
    """A marker in the event queue. The loop sets it when the journal contains all events that were queued before it."""


class Coordinator:
    """The coordinator of an elastic job. The job continues while workers start, stop, hang and die.

    Only metadata passes through the coordinator. Experience goes through the replay buffer, and parameters go through
    the param store. `run()` starts the job, or continues the job in the journal, and returns at its end. All other
    methods can be called from any thread.

    The life of a job, in order:

        `submit`                     starts the loop in a thread; the first event, `Submitted`, starts the job
        `run`                        submits the job, waits for its end, and raises if it failed
        `cancel`, `end`              a person or a callback requests the end with the event `EndRequested`
        `close`                      the program requests the end, and waits for a bounded time
        `TrainingJob.begin_ending`   the core starts the ending: on request, after the commander's `stop`, or in `fail`
        `EndingStep`                 the core closes the tasks step by step; its last effect is `Over`
        `_write_result`              carries out `Over`: writes the result to journal, status file and recorder

    Args:
        commander: Chooses the workers' tasks, and decides when the job is over.
        operator: Starts the workers.
        replay: The replay buffer of the collectors and the learner, or a handle to it.
        param_store: The `ParamStore` of the learners, or a handle to it.
        cfg: The configuration.
        recorder: Writes the metrics and the result. None means that they are not written.

    Raises:
        CheckpointError: The journal cannot be read or written.
    """

    def __init__(
        self,
        commander: Commander,
        operator: Operator,
        replay: Any,
        param_store: Any,
        cfg: CoordinatorConfig,
        recorder: JobRecorder | None = None,
    ) -> None:
        self._cfg, self._recorder = cfg, recorder or JobRecorder()
        self._journal = Journal(pathlib.Path(cfg.path) / "journal.jsonl")
        newest = self._journal.state
        saved = newest if newest is not None and newest["job_id"] == cfg.job_id else None
        newest_before = -1  # newest params version of an earlier job in the same directory
        if newest is not None and saved is None:
            newest_before = max(newest["accounts"]["params_version"], newest["min_version"])
        self._clock = SuspendAwareClock()
        self._job = TrainingJob(
            commander,
            cfg.limits,
            {"learner": 1, "collector": cfg.collectors or cfg.min_collectors},
            by_key=bool(getattr(replay, "fetches_by_key", False)),
            now=self._clock(),
            evaluates=cfg.evaluates,
            counts_before=cfg.counts_before,
            min_version=newest_before,
            saved=saved,
        )
        # The job can be over without a result, if its coordinator was killed before it wrote the result.
        self._result_is_missing = saved is not None and not saved["result_is_written"]
        self._lock = threading.RLock()  # protects the job and the journal
        self._note_added = threading.Condition(self._lock)
        self._events: Inbox[Any] = Inbox()
        self._calls = WorkerCalls(operator.transport, self._events.put)
        self._operator = OperatorThread(operator, self._events.put)
        self._operator_kind = getattr(operator, "kind", type(operator).__name__)
        self._replay = ReplayThread(replay, param_store, self._events.put, pathlib.Path(cfg.path) / "replay")
        self._carry_out: dict[type[ev.Effect], Callable[[Any], None]] = {
            ev.Send: self._calls.send,
            ev.Connect: lambda effect: self._calls.connect(effect.key, effect.address),
            ev.Disconnect: lambda effect: self._calls.disconnect(effect.key),
            **dict.fromkeys((ev.ScaleRole, ev.Replace, ev.Release, ev.EndWorkers), self._operator.put),
            **dict.fromkeys((ev.DrawBatches, ev.FinishBatches, ev.SaveReplay, ev.Pin, ev.Unpin), self._replay.put),
            ev.Note: lambda note: None,  # `_write_journal` has already written the note
            ev.Row: self._write_row,
            ev.Over: self._write_result,
        }
        cores = len(os.sched_getaffinity(0)) if cfg.cores is None else cfg.cores
        self._scaling = Scaling(cfg.min_collectors, cfg.max_collectors, cores, cfg.mean_staleness)
        self._rates = Rates(2)
        self._journaled_accounts, self._journaled_at = self._job.accounts.to_json(), 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    # --- the job

    def submit(self) -> None:
        """Start a thread that runs a new job or continues the job in the journal. `run` also waits for the job's end.

        Raises:
            UsageError: The job in the journal is over. A new job needs another directory.
        """
        with self._lock:
            if self._thread is not None:
                return
            if is_over(self._job.state):
                raise UsageError(
                    f"The job in {self._cfg.path} is over ({self._job.reason}). A new job needs another directory."
                )
            (pathlib.Path(self._cfg.path) / "status.json").unlink(missing_ok=True)  # final status of an earlier job
            self._thread = threading.Thread(target=self._run, name="rlframe coordinator", daemon=True)
            self._thread.start()

    def run(self) -> None:
        """Run the job until it ends. In a node of a program, the end of the program cancels the job.

        Raises:
            JobFailedError: The job failed.
        """
        end = ev.EndRequested(StopReason("interrupt", "the program was stopped"), within=self._cfg.stop_within)
        with handles.stop_with_program(lambda: self._request(end)):
            if not is_over(self._job.state):
                # The garbage collector skips frozen objects. With the imported modules, a collection takes up to 0.1 s.
                gc.collect()
                gc.freeze()
                self.submit()
                self._over.wait()
            elif self._result_is_missing:
                self._write_late_result()
        self._tear_down()
        if self._failure is not None:
            raise self._failure
        if self._job.state is JobState.FAILED:
            raise JobFailedError(f"The job failed: {self._job.reason.rstrip('.')}.")

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds (at most 1) for the job's end. Return True if the job is over.

        Raises:
            Exception: The coordinator's loop failed. The job has stopped, but it can be continued.
        """
        is_set = self._over.wait(min(timeout, 1.0))
        if self._failure is not None:
            raise self._failure
        return is_set or is_over(self._job.state)

    def close(self) -> None:
        """End the job if it still runs, and end the workers, in a bounded time. Repeated calls change nothing."""
        if self._thread is not None and not self._over.is_set():
            self._request(ev.EndRequested(StopReason("interrupt", "it was closed"), within=self._cfg.stop_within))
            self._over.wait(self._cfg.stop_within + _CLOSE_WITHIN)
        self._tear_down()

    def _tear_down(self) -> None:
        self._operator.close()
        self._replay.close()
        self._calls.close()
        with self._lock:
            self._journal.close()

    # --- requests

    def cancel(self, reason: str = "") -> None:
        """End the job: close the tasks and save the learner, without a last evaluation."""
        self._request(ev.EndRequested(StopReason("interrupt", reason or "it was cancelled")))

    def end(self, by: str, evaluate: bool = True) -> None:
        """End the job early because a callback requested it. Repeated calls change nothing.

        Args:
            by: Name of the reason, for `Result.stopped_by`.
            evaluate: Whether to evaluate the last version, as in a job that was not ended early.
        """
        text = "a callback stopped it" if evaluate else "a callback raised"
        self._request(ev.EndRequested(StopReason(by, text), evaluate))

    def pause(self) -> None:
        """Pause the collectors and the learner after their current calls."""
        self._request_change(ev.PauseRequested(True))

    def unpause(self) -> None:
        """Resume the collectors and the learner."""
        self._request_change(ev.PauseRequested(False))

    def scale(self, role: Role, n: int) -> None:
        """Set the number of workers of a role. This turns off the automatic scaling of collectors.

        Raises:
            UsageError: The role does not exist, `n` is out of bounds, or the job does not run.
        """
        self._cfg.check_count(role, n)
        self._request_change(ev.ScaleRequested(role, n))

    def evaluate_now(self) -> None:
        """Evaluate the newest version."""
        if not self._cfg.evaluates:
            raise UsageError("This job has no evaluations: it was started with eval_episodes=0.")
        with self._lock:
            if self._job.tasks.open("evaluate"):
                raise UsageError("An evaluation is already in progress.")
        self._request_change(ev.EvaluationRequested())

    def checkpoint(self) -> None:
        """Save the learner at its next update. If this process samples from the replay buffer, save the buffer now."""
        self._request_change(ev.CheckpointRequested())

    def save_soon(self) -> None:
        """See `Learner.save_soon`. Do nothing if the job is ending, because the learner then saves anyway."""
        with contextlib.suppress(UsageError):
            self.checkpoint()

    def stats(self) -> dict[str, Any]:
        """Return the counters of the job, such as `learner_steps`."""
        return self.status()["job"]

    def restore(self) -> None:
        """Restart the learner from its latest checkpoint. Version numbers keep rising."""
        self._request_change(ev.RestoreRequested())

    def _request_change(self, event: ev.Event) -> None:
        """Make a request that changes the job. Raise if the job has not started, is ending or is over."""
        if self._thread is None:
            raise UsageError("The job has not been submitted, so it cannot be changed.")
        if is_over(self._job.state):
            raise UsageError(f"The job is over: {self._job.state.value} ({self._job.reason}). It takes no commands.")
        if self._job.ending is not None:
            raise UsageError(f"The job is ending and cannot be changed any more. {self._job.reason}".rstrip())
        self._request(event)

    def _request(self, event: ev.Event) -> None:
        """Queue a request. Wait up to 1 s until it is in the journal, so that a restart does not lose it."""
        mark = _JournaledMarker()
        self._events.put(event)
        self._events.put(mark)
        if self._thread is not None and threading.current_thread() is not self._thread:
            mark.wait(_JOURNAL_WITHIN)

    def status(self) -> dict[str, Any]:
        """Return the status of the job. See docs/run/elastic.md."""
        with self._lock:
            return statuses.status(
                self._job,
                self._journaled_accounts,
                run_info=self._cfg.run_info,
                limits={"collector": [self._cfg.min_collectors, self._cfg.max_collectors]},
                operator={"kind": self._operator_kind, "problems": self._operator.problems()},
                replay=self._replay.stats,
                rates=self._rates,
                now=self._clock(),
            )

    def events(self, since: int = 0, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Return the notes after the number `since`.

        A note has the keys number, time (Unix time in seconds), kind and text, and can have other keys. Numbers rise,
        even across restarts. If there is no newer note, wait up to `timeout` seconds (at most 1) for a note.
        """
        with self._note_added:
            notes = self._journal.notes
            self._note_added.wait_for(lambda: bool(notes) and notes[-1]["number"] > since, min(timeout, 1.0))
            return [note for note in notes if note["number"] > since]

    # --- the loop

    def _run(self) -> None:
        tick_at = 0.0
        try:
            self._operator.start()
            self._replay.start()
            self._recorder.begin(self._job.accounts)
            self._advance([ev.Submitted()])
            while not is_over(self._job.state):
                happened = self._next_events()
                if time.monotonic() >= tick_at:
                    happened.append(ev.Ticked())
                    tick_at = time.monotonic() + _TICK
                with _HANDLING:
                    self._advance(happened)
        except BaseException as error:
            self._failure = error
        finally:
            self._over.set()
            with self._note_added:
                self._note_added.notify_all()

    def _next_events(self) -> list[Any]:
        """Send the delayed calls that are due. Wait for a short time, and return the events since the last call."""
        self._clock.tick()
        found: list[Any] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._events.get(min(_TICK, self._calls.send_due())))
            while len(found) < 256:
                found.append(self._events.get(0.0))
        return found

    def _advance(self, happened: list[Any]) -> None:
        """Pass the events to the job, write the journal, and carry out the effects."""
        effects: list[ev.Effect] = []
        with self._lock:
            for event in happened:
                if not isinstance(event, _JournaledMarker):
                    effects += advance(self._job, event, self._clock())
            if (wanted := self._scaling.wanted(self._job, self._clock())) is not None:
                effects += advance(self._job, ev.ScaleRequested("collector", wanted, "load"), self._clock())
            self._write_journal(effects)
        for event in happened:
            if isinstance(event, _JournaledMarker):
                event.set()
        for effect in effects:
            self._carry_out[type(effect)](effect)

    def _write_journal(self, effects: list[Any]) -> None:
        """Write the state to the journal. Called before the effects are carried out, so that a restart repeats them."""
        notes, now = [effect for effect in effects if isinstance(effect, ev.Note)], time.monotonic()
        for note in notes:
            fields = {name: value for name, value in note.fields.items() if isinstance(value, _JSON_SCALARS)}
            number = self._journal.notes[-1]["number"] + 1 if self._journal.notes else 1
            self._journal.note({**fields, "number": number, "time": time.time(), "kind": note.kind, "text": note.text})
        if notes or now > self._journaled_at + _JOURNAL_EVERY:
            self._journaled_at = now
            state = {**self._job.to_json(), "job_id": self._cfg.job_id, "result_is_written": False}
            if state != self._journal.state:
                self._journal.write(state)
            self._journaled_accounts = state["accounts"]
            self._rates.add(self._clock(), self._job.accounts.env_steps, self._job.accounts.learned)
        if notes:
            self._note_added.notify_all()

    def _write_row(self, row: ev.Row) -> None:
        is_training, stats = "steps_per_second" in row.values, self._replay.stats
        replay = {f"replay_{name}": stats[name] for name in stats if is_training and name != "kind"}
        self._recorder.write(row.env_steps, {**row.values, **replay}, self._job.accounts)

    def _write_late_result(self) -> None:
        """Write the result of a job whose coordinator was killed before it wrote the result."""
        self._replay.start()
        self._recorder.begin(self._job.accounts)
        self._write_result(ev.Over(self._job.state is JobState.FAILED, self._job.reason))

    def _write_result(self, over: ev.Over) -> None:
        """Write the result of the job, after all workers have stopped."""
        self._replay.close()
        with self._lock:
            self._journaled_accounts = self._job.accounts.to_json()
            status = self.status()
        path = pathlib.Path(self._cfg.path) / "status.json"
        try:
            write_atomically(path, json.dumps(status, indent=1), "\n")
        except OSError as error:  # continue, because the recorder must still write the result
            _log.warning("Cannot write %s: %s.", path, error.strerror)
        ending = self._job.ending
        found = {name: getattr(ending, name, None) for name in ("evaluation", "evaluation_error")}
        by = ending.reason.by if ending is not None else ""
        summary = {**status["job"], "failed": over.failed, "reason": over.reason, "stopped_by": by, **found}
        self._recorder.finish(summary)
        with self._lock:
            self._journal.write({**(self._journal.state or {}), "result_is_written": True})
