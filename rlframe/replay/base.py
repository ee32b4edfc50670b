"""What every replay buffer answers to, wherever it keeps its experience."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rlframe.errors import StoppedError, UsageError, suggest
from rlframe.types import Batch, ReplaySpec, Step

STATS = ("items", "steps", "added", "sampled", "evicted", "evicted_unsampled", "dropped_priorities", "bytes")


class ReplayClosedError(StoppedError):
    """The replay buffer was closed while a call waited."""


class BaseReplayBuffer(abc.ABC):
    """Experience between actors and a learner. Every method may be called from any thread.

    A writer claims a rank, adds whole batches of steps under global environment ids, and the buffer
    completes items (`Transition` or `Sequence`) out of them, each as soon as its last step is there.
    """

    spec: ReplaySpec
    is_saved_by_learner = False  # whether `save(path)` and `restore(path)` keep what ends with this program

    @abc.abstractmethod
    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        """Registers a writer of `num_envs` environments and returns its (rank, incarnation).

        A writer that cannot say yet how many there are (their seeds depend on its rank) leaves `num_envs` out, and
        calls `open_segment` before it adds.

        Without `rank` the lowest free one is given. A rank that is claimed again gets the next incarnation, and the
        fragments that its predecessor left open are discarded; complete items stay.
        """

    @abc.abstractmethod
    def open_segment(self, rank: int, num_envs: int) -> None:
        """Says how many environments the writer that claimed `rank` steps."""

    @abc.abstractmethod
    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Adds one step of the environments `env_ids` ([B] int64, global, of one rank, none twice)."""

    def end_waits(self, rank: int) -> None:  # noqa: B027  where nothing waits there is nothing to do
        """Ends an `add` of the writer `rank` that waits for room, now or later, with StoppedError: its Actor stops."""

    def forget_before(self, version: int) -> None:  # noqa: B027  only queues of on-policy agents have something to forget
        """Drops the items of a queue that a version below `version` acted in, those that are to come too.

        They are counted as `evicted_unsampled`. The Learner calls this with each update that makes items too old.
        """

    def note_update(self, keys: Any, version: int) -> None:  # noqa: B027  only few care
        """The Learner has learned from the items `keys` ([B, 3]; of none when it starts), and is at `version` now."""

    @abc.abstractmethod
    def sample(self) -> Batch | None:
        """Draws a batch, or returns None while there is too little."""

    @abc.abstractmethod
    def make_dataset(self) -> Iterator[Batch]:
        """Batches without end, drawn ahead by a thread."""

    @abc.abstractmethod
    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities ([B], not negative) of the items `keys` ([B, 3]). Those that are gone are counted."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Items that can be sampled now."""

    @abc.abstractmethod
    def stats(self) -> dict[str, int]:
        """Counters: items, steps, added, sampled, evicted, evicted_unsampled, dropped_priorities, bytes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stops the datasets. Calling it twice does nothing."""


def as_replay_buffer(target: Any, specs: Callable[[], Any]) -> Any:
    """Something to add to and sample from, for an argument that may be a replay buffer or a `reverb.Client`.

    Args:
        target: a replay buffer, which is returned as it is, or a client of a Reverb server.
        specs: gives the agent's `replay_spec` and `step_spec` (an `AgentSpecs`, or the agent); called where needed.
    """
    # By its module's name: only who has a client of Reverb's has imported Reverb.
    if type(target).__module__.partition(".")[0] != "reverb":
        return target
    from rlframe.replay.reverb import ReverbReplayBuffer

    return ReverbReplayBuffer(specs(), target)


def override(spec: ReplaySpec, overrides: dict[str, Any]) -> ReplaySpec:
    """Returns `spec` with some fields replaced. Raises `UsageError` for a name that it has not."""
    known = [field.name for field in dataclasses.fields(ReplaySpec)]
    for name in overrides:
        if name not in known:
            options = ", ".join(known)
            raise UsageError(f"A replay buffer has no option {name!r}; it has {options}.{suggest(name, known)}")
    return dataclasses.replace(spec, **overrides)
