"""The states of jobs, tasks and workers, and which may follow which; the steps of a job's ending."""

from __future__ import annotations

import enum
from typing import Any

from rlframe.errors import RlframeError


class TransitionError(RlframeError):
    """A transition that is not allowed: a bug of this package, never of a worker."""


class _State(enum.Enum):
    # Each is one object, and what may follow is asked for with every message: Enum's own hash is of its name, slowly.
    __hash__ = object.__hash__


class JobState(_State):
    """The states of a job."""

    INIT = "INIT"
    CONNECTING = "CONNECTING"  # to the operator
    WAITING = "WAITING"  # for a learner
    RUNNING = "RUNNING"
    DEGRADED = "DEGRADED"  # the learner is being replaced, collectors continue
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"  # tasks are closed, the last version is evaluated
    CLOSED = "CLOSED"
    FAILED = "FAILED"


class TaskState(_State):
    """The states of a task."""

    PENDING = "PENDING"
    ASSIGNED = "ASSIGNED"  # to a worker that has been told to start
    RUNNING = "RUNNING"
    CLOSING = "CLOSING"  # its worker must close it, or it has its result
    RETRYING = "RETRYING"  # its worker was lost
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class WorkerState(_State):
    """The states of one incarnation of a worker."""

    REQUESTED = "REQUESTED"  # from the operator: it has no address yet
    CONNECTING = "CONNECTING"  # to it: its first ping is out
    IDLE = "IDLE"
    BUSY = "BUSY"
    CLOSING = "CLOSING"  # its task is CLOSING
    SUSPECT = "SUSPECT"  # it has not answered for a while
    LOST = "LOST"
    DRAINING = "DRAINING"  # it leaves once its task is closed
    GONE = "GONE"


class EndingStep(_State):
    """The steps of a job's ending, in their order. Each begins when the last one is done, or took too long."""

    COLLECTORS = "collectors"  # close their tasks
    LEARNER = "learner"  # saves, and closes its task
    EVALUATION = "evaluation"  # of the last version
    WORKERS = "workers"  # are ended by the operator


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
    """A record with a state, which only `become` changes."""

    state: Any

    def become(self, state: enum.Enum) -> None:
        """Change the state. Raises TransitionError if `state` may not follow."""
        if state is not self.state:
            check(self.state, state)
            self.state = state


def is_over(state: enum.Enum) -> bool:
    """Return True if no state follows this one."""
    return not TRANSITIONS[state]


def check(before: enum.Enum, after: enum.Enum) -> None:
    """Raise TransitionError if `after` may not follow `before`."""
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(state.name for state in TRANSITIONS[before])) or "nothing: it is over"
        raise TransitionError(f"{type(before).__name__} {before.name} cannot become {after.name}, only {allowed}.")
