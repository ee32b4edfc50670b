"""States of jobs, tasks and workers, the allowed transitions, and the steps of a job's ending."""

from __future__ import annotations

import enum
from typing import Any

from rlframe.errors import RlframeError


class TransitionError(RlframeError):
    """An error for a state transition that is not allowed. It shows a bug in this package, never in a worker."""


class _State(enum.Enum):
    # Each message looks up transitions by state. Members are singletons, so they can be hashed by identity, which
    # is faster than Enum's hash of the name.
    __hash__ = object.__hash__


class JobState(_State):
    """The states of a job."""

    INIT = "INIT"
    CONNECTING = "CONNECTING"  # the operator has not answered yet
    WAITING = "WAITING"  # no learner has started yet
    RUNNING = "RUNNING"
    DEGRADED = "DEGRADED"  # the learner is being replaced; collectors continue
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"  # tasks are being closed, then the last version is evaluated
    CLOSED = "CLOSED"
    FAILED = "FAILED"


class TaskState(_State):
    """The states of a task."""

    PENDING = "PENDING"
    ASSIGNED = "ASSIGNED"  # the worker is starting the task
    RUNNING = "RUNNING"
    CLOSING = "CLOSING"  # the worker must close the task; an evaluation already has a result
    RETRYING = "RETRYING"  # the worker was lost or failed; the next state is PENDING
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class WorkerState(_State):
    """The states of one incarnation of a worker."""

    REQUESTED = "REQUESTED"  # the operator has not listed an address yet
    CONNECTING = "CONNECTING"  # the worker has not replied to the first ping yet
    IDLE = "IDLE"
    BUSY = "BUSY"
    CLOSING = "CLOSING"  # the worker's task is CLOSING
    SUSPECT = "SUSPECT"  # no reply for `Limits.suspect_after`
    LOST = "LOST"
    DRAINING = "DRAINING"  # the worker leaves when its task is closed
    GONE = "GONE"


class EndingStep(_State):
    """The steps of a job's ending, in order. A step starts when the previous step is done or its deadline is over."""

    COLLECTORS = "collectors"  # collectors close their tasks
    LEARNER = "learner"  # the learner saves and closes its task
    EVALUATION = "evaluation"  # the last version is evaluated
    WORKERS = "workers"  # the operator ends all workers


_J, _T, _W = JobState, TaskState, WorkerState

_ENDS = {_J.DRAINING, _J.FAILED}
_LIVE = {_W.SUSPECT, _W.LOST, _W.DRAINING, _W.GONE}

TRANSITIONS: dict[enum.Enum, set[Any]] = {
    _J.INIT: {_J.CONNECTING, *_ENDS},
    _J.CONNECTING: {_J.WAITING, *_ENDS},
    _J.WAITING: {_J.RUNNING, _J.PAUSED, *_ENDS},
    _J.RUNNING: {_J.DEGRADED, _J.PAUSED, *_ENDS},
    _J.DEGRADED: {_J.RUNNING, _J.PAUSED, *_ENDS},
    _J.PAUSED: {_J.WAITING, _J.RUNNING, _J.DEGRADED, *_ENDS},
    _J.DRAINING: {_J.CLOSED, _J.FAILED},
    _J.CLOSED: set(),
    _J.FAILED: set(),
    _T.PENDING: {_T.ASSIGNED, _T.CANCELLED, _T.FAILED},
    _T.ASSIGNED: {_T.RUNNING, _T.CLOSING, _T.RETRYING, _T.FAILED, _T.CANCELLED},
    _T.RUNNING: {_T.CLOSING, _T.RETRYING, _T.SUCCEEDED, _T.FAILED, _T.CANCELLED},
    _T.CLOSING: {_T.SUCCEEDED, _T.RETRYING, _T.CANCELLED, _T.FAILED},
    _T.RETRYING: {_T.PENDING, _T.FAILED, _T.CANCELLED},
    _T.SUCCEEDED: set(),
    _T.FAILED: set(),
    _T.CANCELLED: set(),
    _W.REQUESTED: {_W.CONNECTING, _W.LOST, _W.GONE, _W.DRAINING},
    _W.CONNECTING: {_W.IDLE, *_LIVE},
    _W.IDLE: {_W.BUSY, *_LIVE},
    _W.BUSY: {_W.CLOSING, _W.IDLE, *_LIVE},
    _W.CLOSING: {_W.IDLE, *_LIVE},
    _W.SUSPECT: {_W.CONNECTING, _W.IDLE, _W.BUSY, _W.CLOSING, _W.LOST, _W.DRAINING, _W.GONE},
    _W.DRAINING: {_W.LOST, _W.GONE},
    _W.LOST: set(),
    _W.GONE: set(),
}


class Stateful:
    """A record with a state that only `become` changes."""

    state: Any

    def become(self, state: enum.Enum) -> None:
        """Change the state. Raise `TransitionError` if the transition is not allowed."""
        if state is not self.state:
            check(self.state, state)
            self.state = state


def is_over(state: enum.Enum) -> bool:
    """Return True if the state is final."""
    return not TRANSITIONS[state]


def check(before: enum.Enum, after: enum.Enum) -> None:
    """Raise `TransitionError` if the transition from `before` to `after` is not allowed."""
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(state.name for state in TRANSITIONS[before])) or "none, because it is final"
        raise TransitionError(
            f"{type(before).__name__} {before.name} cannot become {after.name}. Allowed states: {allowed}."
        )
