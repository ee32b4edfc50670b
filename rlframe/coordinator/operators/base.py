"""What a coordinator asks of where its workers come from."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable

from rlframe.errors import RlframeError
from rlframe.transport import DEFAULT, Transport

WorkerKey = tuple[str, int]  # (worker_id, incarnation): exactly one life of one worker


class OperatorError(RlframeError):
    """Where workers come from cannot be reached. What runs goes on; the call may be repeated."""


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """One incarnation of a worker that lives, or is about to."""

    worker_id: str  # "collector/1"
    role: str
    index: int
    incarnation: int  # of that index, from 0; never goes back
    address: str | None  # where the operator's transport calls it; None until it serves
    host: str
    pid: int | None  # on that host; None where it is not known
    stays: bool = False  # `release` does not end it: it is listed on, and may be wanted again

    @property
    def key(self) -> WorkerKey:
        """By which `report_failed` and `release` know it."""
        return self.worker_id, self.incarnation


class Operator(abc.ABC):
    """Starts, finds, replaces and ends workers. Any thread may call it; but for `disconnect`, no call takes long.

    What is asked for is a state, not a step: a call may be repeated, and changes nothing then. Only `connect` and
    `list` raise `OperatorError`; whatever else was asked for while nobody could be reached is done as soon as it can.

    Attributes:
        transport: by which its workers are called.
    """

    transport: Transport = DEFAULT

    @abc.abstractmethod
    def connect(self) -> list[WorkerInfo]:
        """Finds the workers that are there already, adopts them, and returns them. From here on the dead are replaced.

        Raises:
            OperatorError: it cannot be reached.
        """

    @abc.abstractmethod
    def request(self, role: str, n: int) -> None:
        """Has `n` workers of this role live in all, from now on. Ends none where there are more; `release` does."""

    @abc.abstractmethod
    def list(self) -> list[WorkerInfo]:
        """The workers that live or start, as far as is known now, by role and index.

        Raises:
            OperatorError: it cannot be reached.
        """

    @abc.abstractmethod
    def report_failed(self, ids: Iterable[WorkerKey]) -> None:
        """Ends these at once, whatever they are at, and replaces each: the same index, the next incarnation."""

    @abc.abstractmethod
    def release(self, ids: Iterable[WorkerKey]) -> None:
        """Ends these for good, giving them the time to do it themselves.

        Where that leaves fewer than are wanted, others are started: `request` the lower number first.
        """

    @abc.abstractmethod
    def disconnect(self, end_workers: bool = True) -> None:
        """Ends all workers, or lets them be, and stops looking after them. Bounded; may be repeated."""

    def problems(self) -> dict[str, str]:
        """What is wrong now, in a sentence each: by worker_id, or "" for what is wrong with all of it."""
        return {}


def worker_id_of(role: str, index: int) -> str:
    """`collector/1`."""
    return f"{role}/{index}"
