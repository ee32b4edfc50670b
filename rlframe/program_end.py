"""Ends: the limits of a run, the end of a program in its nodes, and the end of a with statement.

A session may end before its last step, at the first of its limits:

>>> limits = StopConditions(seconds=60.0, eval_return=475.0)
>>> limits.reached(seconds=12.0, eval_return=490.0)
'an evaluation reached 490, and 475 was wanted'

`stop_program` ends the program of this node. Then `stopped_by_program(stop)` calls `stop` in each of its nodes.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


# --- the limits of a run


class StopReason(str):
    """Why a run ends, as text. `by` names the condition, as `Result.stopped_by` does."""

    by: str

    def __new__(cls, by: str, text: str) -> StopReason:
        """Make the text, with its name."""
        made = super().__new__(cls, text)
        made.by = by
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.by, str(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopConditions:
    """Limits of a run, which ends at the first that it reaches. None: no such limit."""

    env_steps: int | None = None  # of all actors
    learner_steps: int | None = None  # updates
    seconds: float | None = None  # since this session, or the job, began
    eval_return: float | None = None  # mean return of an evaluation during the run

    @property
    def are_set(self) -> bool:
        """Return True if there is a limit."""
        return any(getattr(self, field.name) is not None for field in dataclasses.fields(StopConditions))

    def reached(
        self, *, env_steps: int = 0, learner_steps: int = 0, seconds: float = 0.0, eval_return: float | None = None
    ) -> StopReason | None:
        """Return the first limit that is reached, None if none is.

        Args:
            env_steps, learner_steps, seconds: so far.
            eval_return: mean return of the newest evaluation; None before the first.
        """
        if self.env_steps is not None and env_steps >= self.env_steps:
            return StopReason("steps", f"{env_steps:,} of {self.env_steps:,} environment steps were taken")
        if self.learner_steps is not None and learner_steps >= self.learner_steps:
            return StopReason("until_learner_steps", f"{learner_steps:,} of {self.learner_steps:,} updates were made")
        if self.seconds is not None and seconds >= self.seconds:
            return StopReason("until_seconds", f"{seconds:,.0f} of {self.seconds:,.0f} s are over")
        if self.eval_return is not None and eval_return is not None and eval_return >= self.eval_return:
            text = f"an evaluation reached {eval_return:g}, and {self.eval_return:g} was wanted"
            return StopReason("until_return", text)
        return None


# --- the end of a program, in its nodes


@dataclasses.dataclass(frozen=True)
class _Program:
    """The program that this process is a node of, where that is none of Launchpad's."""

    stop: threading.Event
    end: Callable[[], None]


_program: _Program | None = None


def join_program(stop: threading.Event, end: Callable[[], None]) -> None:
    """Say that this process is a node of a program.

    Args:
        stop: is set when the program is to end.
        end: ends the program.
    """
    global _program
    _program = _Program(stop, end)


def program_stop() -> threading.Event | None:
    """Return the event that is set when the program of this node is to end; None: there is no program."""
    if _program is not None:
        return _program.stop
    manager = sys.modules.get("launchpad.launch.worker_manager")
    try:
        return manager.stop_event() if manager is not None else None
    except RuntimeError:  # not a node's thread
        return None


def is_told_to_end() -> bool:
    """Return whether the program here is to end: known a moment before `stopped_by_program` calls `stop`."""
    event = program_stop()
    return event is not None and event.is_set()


def stop_program() -> None:
    """End the program, where there is one."""
    if _program is not None:
        _program.end()
    elif program_stop() is not None:
        sys.modules["launchpad"].stop()


@contextlib.contextmanager
def stopped_by_program(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop()`, in another thread, when the program of this node ends."""
    event = program_stop()
    if event is None:
        yield
        return
    left = threading.Event()

    def watch() -> None:
        while not left.is_set():
            if event.wait(0.1):
                stop()
                return

    watcher = threading.Thread(target=watch, name="rlframe program stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        watcher.join()


# --- the end of a with statement


class Closing(abc.ABC):
    """A context manager whose end is `close()`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
