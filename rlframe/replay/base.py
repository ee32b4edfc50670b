"""The protocols of replay writers and readers, the base classes of replay buffers, and the class `Dataset`."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from rlframe.errors import RlframeError, StoppedError, UsageError, suggest
from rlframe.interprocess.heartbeat import peer_timeout
from rlframe.shutdown import Closeable
from rlframe.types import Batch, ReplaySpec, Step

STATS = ("items", "steps", "added", "sampled", "evicted", "evicted_unsampled", "dropped_priorities", "bytes")
WAKE_INTERVAL = 0.2  # seconds between two checks whether a dataset is closed; a new batch needs no check
_RETRY_INTERVAL = 0.01  # seconds
_TIMEOUT = 600.0  # default seconds that `next` waits for a batch before it raises


class ReplayClosedError(StoppedError):
    """The replay buffer was closed during a call."""


# --- protocols: methods that an Actor or a Learner calls


@runtime_checkable
class ReplayWriter(Protocol):
    """The methods of a replay that an Actor needs. Any thread can call them.

    A writer claims a rank, and then adds batches of steps with global environment ids. The replay combines steps to
    items (`Transition` or `Sequence`). An item is complete when its last step is added. The Actor does not make the
    items, because each kind of replay makes them in the process where this is cheapest.
    """

    @abc.abstractmethod
    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        """Register a writer, and return its (rank, incarnation).

        Args:
            num_envs: number of the writer's environments. None means that the writer calls `open_segment` before it
                adds steps. (An Actor creates its environments after this call, because their seeds depend on the rank.)
            rank: the rank to claim. None means the lowest free rank. Each new claim of a rank gets the next
                incarnation. Complete items of the previous incarnation stay. Its open fragments are discarded.
        """

    @abc.abstractmethod
    def open_segment(self, rank: int, num_envs: int) -> None:
        """Set how many environments the writer with this rank has."""

    @abc.abstractmethod
    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Add one step of the environments `env_ids`.

        Args:
            env_ids: [B] int64 global ids of environments, all of one rank, without duplicates.
            step: arrays of [B, ...].
        """


@runtime_checkable
class ReplayReader(Protocol):
    """The methods of a replay that a Learner needs. Any thread can call them.

    Attributes:
        spec: describes the items, and how the replay draws them.
    """

    spec: ReplaySpec

    @abc.abstractmethod
    def sample(self) -> Batch | None:
        """Draw a batch. Return None while there are too few items."""

    @abc.abstractmethod
    def make_dataset(self) -> Iterator[Batch]:
        """Return an endless iterator of batches. A thread draws the batches ahead of time."""

    @abc.abstractmethod
    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities ([B], at least 0) of the items `keys` ([B, 3]). Ignore evicted items, but count them."""

    @abc.abstractmethod
    def stats(self) -> dict[str, int]:
        """Return a dict with the counters whose names are in `STATS`."""


# --- base classes of buffers


class BaseReplayBuffer(ReplayWriter, ReplayReader):
    """Base class of replay buffers. It implements the optional methods. See `examples/custom_replay_store.py`.

    A subclass sets `spec`, and defines `claim_rank`, `open_segment`, `add`, `sample` and `stats`.
    """

    is_saved_by_learner = False  # True if the learner saves this buffer with its checkpoints
    fetches_by_key = False  # True for a `KeyedReplayBuffer`
    _closed = False

    def end_waits(self, rank: int) -> None:
        """From now on, calls of `add` by the writer `rank` raise StoppedError if they must wait for free space.

        The writer's Actor calls this when it stops.
        """

    def forget_before(self, version: int) -> None:
        """Drop all items of a queue in which parameters older than `version` acted, now and in later calls of `add`.

        The dropped items count as `evicted_unsampled`. The Learner calls this method if an update makes items too old.
        """

    def note_update(self, keys: Any, version: int) -> None:
        """Store that an update with the items `keys` ([B, 3]) has produced the parameters `version`.

        When the Learner starts, it calls this with empty `keys`.
        """

    def make_dataset(self, prefetch: int = 2, timeout: float | None = None) -> Dataset:
        """Return an endless iterator of batches. A thread draws `prefetch` batches ahead of time.

        Each `next` waits at most `timeout` seconds for a batch. (For None, see `Dataset`.) To end the iteration, close
        the dataset or the buffer.
        """
        dataset = Dataset(self, prefetch, timeout)
        self._datasets.append(dataset)
        return dataset

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Wait up to `timeout` seconds until there are enough items, and return the result of `sample`.

        The method can return None before the timeout.
        """
        batch = self.sample()
        if batch is None and not self.closed:
            time.sleep(min(timeout, _RETRY_INTERVAL))
            batch = self.sample()
        return batch

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities ([B], at least 0) of the items `keys` ([B, 3]). Ignore evicted items, but count them."""
        if self.spec.kind != "prioritized":
            raise UsageError(f"This replay buffer is {self.spec.kind}: it has no priorities to update.")
        self._set_priorities(np.asarray(keys), check_priorities(priorities, len(keys)))

    def _set_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set priorities ([B] float64), which are already checked. Buffers with prioritized sampling define this."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The number of items that can be sampled now."""
        return self.stats()["items"]

    @property
    def closed(self) -> bool:
        """True after `close` was called. A closed buffer returns no batches."""
        return self._closed

    def close(self) -> None:
        """Stop the datasets. Later calls do nothing."""
        self._closed = True
        for dataset in self._datasets:
            dataset.close()
        self._datasets.clear()

    @functools.cached_property
    def _datasets(self) -> list[Any]:
        return []


class Draw(NamedTuple):
    """The keys and probabilities of a batch. Another process can call `fetch` with them to get the items.

    A key is (rank, incarnation, start). Rank and incarnation identify the item's writer. The start is the number of the
    item's first timestep (timeline.py). In a buffer that stores whole items, it is the number of the item.
    """

    keys: np.ndarray  # [B, 3] int64
    probabilities: np.ndarray  # [B] float32


class KeyedReplayBuffer(BaseReplayBuffer):
    """A replay buffer in which one process draws items and another process reads them."""

    fetches_by_key = True

    @abc.abstractmethod
    def draw(self, timeout: float = 0.0) -> Draw | None:
        """Draw a batch like `sample`, but return only its keys. Any process can then read the items with `fetch`.

        The items count as sampled after this call. Items of a queue are not overwritten before `release`.

        Args:
            timeout: seconds to wait for enough items. The method can return None before the timeout.
        """

    @abc.abstractmethod
    def fetch(self, keys: np.ndarray, probabilities: np.ndarray) -> Batch | None:
        """Read the items of a `Draw`. A second call with the same keys returns the same items.

        If items of a uniform or prioritized buffer were overwritten, copies of other rows of the batch replace their
        rows. The keys and probabilities are copied too.

        Args:
            keys: [B, 3] keys from `draw`.
            probabilities: [B] probabilities from `draw`.

        Returns:
            The batch. None if all items were overwritten, or if any item of a queue was overwritten.
        """

    @abc.abstractmethod
    def release(self, keys: np.ndarray) -> None:
        """Release the items of a `Draw` after an update has used them, or after they were lost. Repeated calls work."""


# --- datasets draw batches ahead of time


class DatasetTimeoutError(RlframeError, TimeoutError):
    """No batch was available within the timeout."""


class Dataset(Closeable):
    """An endless iterator of batches. Close it, or use it as a context manager.

    Results depend on timing, because batches are drawn ahead of time. For reproducible results, call `sample()`.

    Args:
        buffer: the buffer from which to draw.
        prefetch: number of batches to draw ahead of time.
        timeout: maximum seconds that `next` waits for a batch. None means 600 seconds, but no limit in a process whose
            heartbeats are watched (`rlframe.interprocess.heartbeat`).
    """

    def __init__(self, buffer: BaseReplayBuffer, prefetch: int, timeout: float | None):
        self._buffer, self._timeout = buffer, peer_timeout(_TIMEOUT) if timeout is None else timeout
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=max(1, prefetch))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe replay dataset", daemon=True)
        self._thread.start()

    def __iter__(self) -> Dataset:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: the dataset or the buffer is closed.
            DatasetTimeoutError: no batch was available within the timeout.
        """
        deadline = time.monotonic() + self._timeout
        while not self._stop.is_set():
            try:
                batch = self._ready.get(timeout=min(WAKE_INTERVAL, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                self._check()
                if time.monotonic() < deadline:
                    continue
                spec = self._buffer.spec
                raise DatasetTimeoutError(
                    f"No batch was available for {self._timeout:g} s. The replay buffer has {self._buffer.size} items. "
                    f"It needs {spec.min_size} items and a batch of {spec.batch_size or 'one item per environment'}. "
                    "Are its actors running?"
                ) from None
            if isinstance(batch, BaseException):
                self.close()
                raise batch
            return batch
        raise StopIteration

    def close(self) -> None:
        """End the thread. Later calls do nothing."""
        self._stop.set()
        self._interrupt()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and not self._buffer.closed:
                batch = self._draw()
                if batch is not None:
                    self._put(batch)
                del batch  # so that the arrays can be reused after the reader deletes the batch
        except BaseException as error:  # `next` raises this error
            self._put(error)
        else:
            self._stop.set()

    def _draw(self) -> Batch | None:
        """Return the next batch, or None if there is no batch after a short time. Only the thread calls this."""
        return self._buffer.wait_for_batch(WAKE_INTERVAL)

    def _check(self) -> None:
        """Raise an error if no further batch is possible. `next` calls this while it waits."""

    def _interrupt(self) -> None:
        """End a call of `_draw` that waits without a timeout."""

    def _put(self, batch: Batch | BaseException) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(batch, timeout=WAKE_INTERVAL)
                return


# --- checks of arguments


def check_keys(keys: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of keys ([B, 3] int64) and probabilities ([B] float32). Raise UsageError if a shape is wrong."""
    keys, probabilities = np.array(keys, np.int64), np.array(probabilities, np.float32)
    if keys.ndim != 2 or keys.shape[1] != 3 or not len(keys) or probabilities.shape != (len(keys),):
        raise UsageError(
            f"fetch expected keys [B, 3] and probabilities [B] from `draw`; got {list(keys.shape)} and "
            f"{list(probabilities.shape)}."
        )
    return keys, probabilities


def check_priorities(priorities: np.ndarray, count: int) -> np.ndarray:
    """Convert priorities to [count] float64. Raise UsageError if a priority is negative, NaN or infinite."""
    priorities = np.asarray(priorities, np.float64)
    lowest, highest = priorities.min(initial=np.inf), priorities.max(initial=0.0)
    if priorities.shape != (count,) or not lowest >= 0 or not highest < np.inf:  # `not` also finds NaN
        raise UsageError(
            f"update_priorities expected {count} finite priorities that are not negative, one for each key; "
            f"got shape {priorities.shape}, from {lowest} to {highest}."
        )
    return priorities


def replace_evicted(batch: Any, evicted: np.ndarray) -> bool:
    """Replace the `evicted` rows ([B] bool) of `batch` by other rows. Return False if all rows are evicted.

    A copy of another row is as good as a new draw, because all draws are independent.
    """
    if evicted.all():
        return False
    if evicted.any():
        rows, others = evicted.nonzero()[0], np.resize((~evicted).nonzero()[0], np.count_nonzero(evicted))
        for array in jax.tree_util.tree_leaves(batch):
            array[rows] = array[others]
    return True


def override(spec: ReplaySpec, overrides: dict[str, Any]) -> ReplaySpec:
    """Return a copy of `spec` with some fields replaced. Raise UsageError for an unknown field."""
    known = [field.name for field in dataclasses.fields(ReplaySpec)]
    for name in overrides:
        if name not in known:
            options = ", ".join(known)
            raise UsageError(f"A replay buffer has no option {name!r}; it has {options}.{suggest(name, known)}")
    return dataclasses.replace(spec, **overrides)
