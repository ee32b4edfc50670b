"""Errors that a user can act on.

The command line prints the message of a `RlframeError` alone, without a traceback, and exits with
`exit_code`: 2 where the input was wrong, 1 where a run failed.
"""

from __future__ import annotations

import copyreg
import difflib
import numbers
from collections.abc import Iterable, Iterator
from typing import Any


class RlframeError(Exception):
    """A failure that its message explains: the thing, what was expected, what came, what to do."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own calls `__init__` with the message alone, which a class with more arguments does not take.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class UsageError(RlframeError, ValueError):
    """The caller asked for something that cannot be: a wrong name, option, shape or configuration."""

    exit_code = 2


class EnvError(RlframeError):
    """An environment raised, or the process that ran it died. Names the environment's id."""


class NonFiniteLossError(RlframeError):
    """A loss or gradient was NaN or infinite. Names the learner step."""


class CheckpointError(RlframeError):
    """A checkpoint could not be read or written. What was saved before is untouched."""


class StaleGroupError(UsageError):
    """A group of trajectories is of an older policy than the trainer takes. Another, of the present one, may do."""


class StoreError(RlframeError):
    """A store of trajectories is damaged, in use, another program's, or lost what it had acknowledged. Names it."""


class ForcedExitError(RlframeError):
    """A second Ctrl-C ended a run before it had saved. Names what was saved last."""


class PeerError(RlframeError):
    """Another process did not answer within its deadline. Names it, the call, and how long was waited."""


class StoppedError(PeerError):
    """Whoever waited for another process was told to stop."""


class FencedError(RlframeError):
    """Whoever calls was replaced: a newer attempt is at its task, and nothing that the older one does arrives."""


class RemoteError(RlframeError):
    """A call raised in the process that it was sent to. Names both, and has the traceback."""


class NoMethodError(RemoteError):
    """The called node has no method of that name."""


class UnavailableError(RlframeError):
    """A service cannot answer just now, or no longer. The same call may be repeated, there or elsewhere."""


class ProgramError(RlframeError):
    """A program of several processes failed. Names the node, and has its traceback."""


class JobFailedError(ProgramError):
    """A job under a coordinator failed, in spite of all that it tries again. Names what failed last."""


class FieldError(UsageError):
    """A field of a request that cannot be. `field` names it."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


class ConflictError(UsageError):
    """The state that the job is in does not allow the request."""


def check_at_least(config: object, least: float, *names: str) -> None:
    """Raise `UsageError` for the first of these fields that is below `least`. None is left alone."""
    for name, value in _numbers(config, names):
        if not value >= least:
            raise UsageError(f"{type(config).__name__}.{name} must be at least {least}, got {value}.")


def check_above(config: object, bound: float, *names: str) -> None:
    """Raise `UsageError` for the first of these fields that is not above `bound`. None is left alone."""
    for name, value in _numbers(config, names):
        if not value > bound:
            raise UsageError(f"{type(config).__name__}.{name} must be above {bound}, got {value}.")


def check_fraction(config: object, *names: str) -> None:
    """Raise `UsageError` for the first of these fields that is not between 0 and 1. None is left alone."""
    for name, value in _numbers(config, names):
        if not 0.0 <= value <= 1.0:  # NaN is not
            raise UsageError(f"{type(config).__name__}.{name} must be in [0, 1], got {value}.")


def _numbers(config: object, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are not None. Raise `UsageError` for a field that is no number."""
    values = {name: getattr(config, name) for name in names}
    for name, value in values.items():
        if value is not None:
            if not isinstance(value, numbers.Number) and getattr(value, "shape", None) != ():
                raise UsageError(f"{type(config).__name__}.{name} must be a number, got {value!r}.")
            yield name, value


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean X?"` for the known name nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
