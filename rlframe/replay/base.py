"""The protocols of a replay for writers and readers, the base classes of buffers, and `Dataset`."""

from __future__ import annotations

import abc
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
WAKE_INTERVAL = 0.2  # seconds between two checks whether a dataset was closed; a new batch ends the wait sooner
_RETRY_INTERVAL = 0.01  # seconds
_TIMEOUT = 600.0  # default seconds that `next` waits for a batch before it raises


class ReplayClosedError(StoppedError):
    """The replay buffer was closed during a call."""


# --- protocols: the methods that an Actor and a Learner need


@runtime_checkable
class ReplayWriter(Protocol):
    """The methods of a replay that an Actor needs. Any thread may call them.

    A writer claims a rank, and then adds batches of steps under global environment ids. The replay makes items
    (`Transition` or `Sequence`) of the steps. An item is complete when its last step is added. The Actor does not make
    the items, because each kind of replay makes them where this costs least.
    """

    @abc.abstractmethod
    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        """Register a writer, and return its (rank, incarnation).

        Args:
            num_envs: number of the writer's environments. None means that the writer calls `open_segment` before it
                adds steps. (An Actor creates its environments after this call, because their seeds depend on the rank.)
            rank: the rank to claim. None means the lowest free rank. Each new claim of a rank gets the next
                incarnation. The complete items of the previous incarnation stay, and its open fragments are discarded.
        """

    @abc.abstractmethod
    def open_segment(self, rank: int, num_envs: int) -> None:
        """Set the number of environments of the writer with `rank`."""

    @abc.abstractmethod
    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Add one step of the environments `env_ids`.

        Args:
            env_ids: [B] int64 global ids of environments, all of one rank, without duplicates.
            step: arrays of [B, ...].
        """


@runtime_checkable
class ReplayReader(Protocol):
    """The methods of a replay that a Learner needs. Any thread may call them.

    Attributes:
        spec: the kind of the items, and how the items are drawn.
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
        """Set the priorities ([B], not negative) of the items `keys` ([B, 3]). Evicted items are only counted."""

    @abc.abstractmethod
    def stats(self) -> dict[str, int]:
        """Return the counters items, steps, added, sampled, evicted, evicted_unsampled, dropped_priorities, bytes."""


# --- base classes of buffers


class BaseReplayBuffer(ReplayWriter, ReplayReader):
    """Base class of buffers, with defaults for optional methods. See `examples/custom_replay_store.py`.

    A subclass sets `spec`, and defines `claim_rank`, `open_segment`, `add`, `sample` and `stats`.
    """

    is_saved_by_learner = False  # True if the learner's checkpoints call `save(path)` and `restore(path)`
    fetches_by_key = False  # True for a `KeyedReplayBuffer`
    _closed = False

    def end_waits(self, rank: int) -> None:
        """Make each present or later `add` of the writer `rank` raise StoppedError instead of waiting for room.

        Called when the writer's Actor stops.
        """

    def forget_before(self, version: int) -> None:
        """Drop present and later items of a queue that have a step by parameters older than `version`.

        The dropped items count as `evicted_unsampled`. The Learner calls this method after each update that makes items
        too old.
        """

    def note_update(self, keys: Any, version: int) -> None:
        """Record that the Learner reached `version` after it learned from the items `keys` ([B, 3]).

        When the Learner starts, `keys` is empty.
        """

    def make_dataset(self, prefetch: int = 2, timeout: float | None = None) -> Dataset:
        """Return an endless iterator of batches. A thread draws `prefetch` batches ahead of time.

        Each `next` waits at most `timeout` seconds for a batch (None: see `Dataset`). To end the iteration, close the
        dataset or the buffer.
        """
        dataset = Dataset(self, prefetch, timeout)
        self._datasets.append(dataset)
        return dataset

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Return the result of `sample`, but wait up to `timeout` seconds for enough items.

        The method may return None earlier.
        """
        batch = self.sample()
        if batch is None and not self.closed:
            time.sleep(min(timeout, _RETRY_INTERVAL))
            batch = self.sample()
        return batch

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities ([B], not negative) of the items `keys` ([B, 3]). Evicted items are only counted."""
        if self.spec.kind != "prioritized":
            raise UsageError(f"This replay buffer is {self.spec.kind}: it has no priorities to update.")
        self._set_priorities(np.asarray(keys), check_priorities(priorities, len(keys)))

    def _set_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set checked priorities ([B] float64). Buffers that support prioritized sampling define this method."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The number of items that can be sampled now."""
        return self.stats()["items"]

    @property
    def closed(self) -> bool:
        """True after `close`. A closed buffer returns no more batches."""
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
    """The keys and probabilities of a batch. Another process can `fetch` the items.

    A key is (rank, incarnation, start). Rank and incarnation identify the item's writer. The start is the number of the
    item's first timestep (timeline.py), or the item's own number in a buffer that stores whole items.
    """

    keys: np.ndarray  # [B, 3] int64
    probabilities: np.ndarray  # [B] float32


class KeyedReplayBuffer(BaseReplayBuffer):
    """A buffer whose items can be drawn in one process and read in another. See `docs/data.md`."""

    fetches_by_key = True

    @abc.abstractmethod
    def draw(self, timeout: float = 0.0) -> Draw | None:
        """Draw a batch like `sample`, but return only its keys. Then `fetch` reads the items, in any process.

        The items now count as sampled. Items of a queue are not overwritten before `release`.

        Args:
            timeout: seconds to wait for enough items. The method may return None earlier.
        """

    @abc.abstractmethod
    def fetch(self, keys: np.ndarray, probabilities: np.ndarray) -> Batch | None:
        """Read the items of a `Draw`. The same items can be fetched again.

        If items of a uniform or prioritized buffer were overwritten, their rows of the batch get copies of other rows,
        including the keys and probabilities.

        Args:
            keys: [B, 3] keys from `draw`.
            probabilities: [B] probabilities from `draw`.

        Returns:
            The batch. None if all items were overwritten, or if any item of a queue was overwritten.
        """

    @abc.abstractmethod
    def release(self, keys: np.ndarray) -> None:
        """Release the items `keys` of a `Draw`, after they were learned from or lost. The call may be repeated."""


# --- drawing ahead of time


class DatasetTimeoutError(RlframeError, TimeoutError):
    """No batch was available within the timeout."""


class Dataset(Closeable):
    """An endless iterator of batches. Close it, or use it as a context manager.

    Results depend on timing, because batches are drawn ahead of time. For reproducible results, call `sample()`.

    Args:
        buffer: the buffer to draw from.
        prefetch: number of batches to draw ahead of time.
        timeout: most seconds that `next` waits for a batch. None means 600 seconds, or no limit in a process whose
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
                del batch  # then the arrays can be reused once the reader deletes the batch
        except BaseException as error:  # `next` raises this error
            self._put(error)
        else:
            self._stop.set()

    def _draw(self) -> Batch | None:
        """Return the next batch. None if no batch is available after a short time. Only the thread calls this."""
        return self._buffer.wait_for_batch(WAKE_INTERVAL)

    def _check(self) -> None:
        """Raise an error if no further batch is possible. Called while the reader waits."""

    def _interrupt(self) -> None:
        """End a `_draw` that waits without a timeout."""

    def _put(self, batch: Batch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(batch, timeout=WAKE_INTERVAL)
                return
            except queue.Full:
                continue


# --- checks of arguments


def check_keys(keys: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of type [B, 3] int64 and [B] float32. Raise `UsageError` if a shape is wrong."""
    keys, probabilities = np.array(keys, np.int64), np.array(probabilities, np.float32)
    if keys.ndim != 2 or keys.shape[1] != 3 or not len(keys) or probabilities.shape != (len(keys),):
        raise UsageError(
            f"fetch expected keys [B, 3] and probabilities [B] from `draw`; got {list(keys.shape)} and "
            f"{list(probabilities.shape)}."
        )
    return keys, probabilities


def check_priorities(priorities: np.ndarray, count: int) -> np.ndarray:
    """Return `priorities` as [count] float64. Raise `UsageError` unless they are finite and not negative."""
    priorities = np.asarray(priorities, np.float64)
    lowest, highest = priorities.min(initial=np.inf), priorities.max(initial=0.0)
    if priorities.shape != (count,) or not lowest >= 0 or not highest < np.inf:  # `not` makes NaN fail too
        raise UsageError(
            f"update_priorities expected {count} finite priorities that are not negative, one for each key; "
            f"got shape {priorities.shape}, from {lowest} to {highest}."
        )
    return priorities


def replace_evicted(batch: Any, evicted: np.ndarray) -> bool:
    """Replace the `evicted` rows ([B] bool) of `batch` by other rows. Return False if all rows are evicted.

    All draws are independent, so another row of the batch can replace a new draw.
    """
    if evicted.all():
        return False
    if evicted.any():
        rows, others = evicted.nonzero()[0], np.resize((~evicted).nonzero()[0], np.count_nonzero(evicted))
        for array in jax.tree_util.tree_leaves(batch):
            array[rows] = array[others]
    return True


def override(spec: ReplaySpec, overrides: dict[str, Any]) -> ReplaySpec:
    """Return `spec` with some fields replaced. Raise `UsageError` for an unknown field."""
    known = [field.name for field in dataclasses.fields(ReplaySpec)]
    for name in overrides:
        if name not in known:
            options = ", ".join(known)
            raise UsageError(f"A replay buffer has no option {name!r}; it has {options}.{suggest(name, known)}")
    return dataclasses.replace(spec, **overrides)
