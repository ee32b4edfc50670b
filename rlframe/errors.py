"""Errors that users can act on.

For a `RlframeError`, the command line prints only the message, without a traceback. It exits with `exit_code`: 2 for
wrong input, 1 for a failed run.
"""

from __future__ import annotations

import copyreg
import difflib
import numbers
from collections.abc import Iterable, Iterator
from typing import Any


class RlframeError(Exception):
    """Base class of rlframe's errors.

    The message contains the problem, the expected and the received value, and a way to fix it.
    """

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would pass only the message to `__init__`, which fails for classes with more arguments.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class UsageError(RlframeError, ValueError):
    """Wrong input: an invalid name, option, shape or configuration."""

    exit_code = 2


class EnvError(RlframeError):
    """An environment raised an error, or its process died. The message contains the environment's id."""


class NonFiniteLossError(RlframeError):
    """A loss or gradient was NaN or infinite. The message contains the learner step."""


class CheckpointError(RlframeError):
    """A checkpoint could not be read or written. Earlier checkpoints are unchanged."""


PERMANENT_ERRORS = (UsageError, NonFiniteLossError, CheckpointError)  # a restart would fail in the same way


class StaleGroupError(UsageError):
    """The trainer refused a group of trajectories because it was sampled with a policy version that is too old.

    A new group from the current policy may be accepted.
    """


class StoreError(RlframeError):
    """A trajectory store cannot be used. The message contains its location.

    The store is damaged, in use, belongs to another program, or lost data that it had acknowledged.
    """


class ForcedExitError(RlframeError):
    """A second Ctrl-C ended a run before it could save. The message contains the last checkpoint."""


class PeerError(RlframeError):
    """Another process did not answer within the deadline.

    The message contains the process, the call and the waiting time.
    """


class StoppedError(PeerError):
    """The wait for another process was stopped, for example because the program ends."""


class FencedError(RlframeError):
    """A newer attempt has replaced the caller's attempt at a task. The caller's writes are rejected."""


class RemoteError(RlframeError):
    """A remote call raised an error. The message contains the call, the called process and the traceback."""


class NoMethodError(RemoteError):
    """The called node does not have this method."""


class UnavailableError(RlframeError):
    """A service cannot answer now. The caller may retry the call, at this service or another one."""


class ProgramError(RlframeError):
    """A program of several processes failed. The message contains the name of the failed node and its traceback."""


class JobFailedError(ProgramError):
    """A job of a coordinator failed after all retries. The message contains the last failure."""


class FieldError(UsageError):
    """A field of a request is invalid. `field` is its name; None if the error comes from another process."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConflictError(UsageError):
    """The job's current state does not allow the request."""


def error_from_message(kind: type[RlframeError], message: str) -> RlframeError:
    """Return an error that another process raised. The attributes that its class adds are missing."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


def check_at_least(config: object, least: float, *names: str) -> None:
    """Raise `UsageError` if a field is below `least`. Skip fields that are None."""
    for name, value in _numbers(config, names):
        if not value >= least:
            raise UsageError(f"{type(config).__name__}.{name} must be at least {least}, got {value}.")


def check_above(config: object, bound: float, *names: str) -> None:
    """Raise `UsageError` if a field is not above `bound`. Skip fields that are None."""
    for name, value in _numbers(config, names):
        if not value > bound:
            raise UsageError(f"{type(config).__name__}.{name} must be above {bound}, got {value}.")


def check_fraction(config: object, *names: str) -> None:
    """Raise `UsageError` if a field is not between 0 and 1. Skip fields that are None."""
    for name, value in _numbers(config, names):
        if not 0.0 <= value <= 1.0:  # NaN is also refused
            raise UsageError(f"{type(config).__name__}.{name} must be in [0, 1], got {value}.")


def _numbers(config: object, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are not None. Raise `UsageError` for a field that is not a number."""
    values = {name: getattr(config, name) for name in names}
    for name, value in values.items():
        if value is not None:
            if not isinstance(value, numbers.Number) and getattr(value, "shape", None) != ():
                raise UsageError(f"{type(config).__name__}.{name} must be a number, got {value!r}.")
            yield name, value


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean X?"` with the known name most similar to `name`, or "" if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
