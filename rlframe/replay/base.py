"""The protocols of a replay for writers and readers, the base classes of buffers, and `Dataset`, which draws ahead."""

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
WAKE_INTERVAL = 0.2  # seconds between two checks of a dataset whether it was closed; a batch ends the wait sooner
_RETRY_INTERVAL = 0.01  # seconds
_TIMEOUT = 600.0  # seconds that a dataset waits for a batch before `next` raises


class ReplayClosedError(StoppedError):
    """The replay buffer was closed while a call waited."""


# --- the protocols: what an Actor and a Learner need of a replay


@runtime_checkable
class ReplayWriter(Protocol):
    """The half of a replay that an Actor needs. Every method may be called from any thread.

    A writer claims a rank, and then adds batches of steps under global environment ids. The replay makes items
    (`Transition` or `Sequence`) of the steps, each as soon as its last step is there. The Actor does not: each replay
    makes items where it costs least.
    """

    @abc.abstractmethod
    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        """Register a writer, and return its (rank, incarnation).

        Args:
            num_envs: number of its environments; None: the writer calls `open_segment` before it adds. (An Actor makes
                its environments after this call, since their seeds depend on the rank.)
            rank: to claim; None: the lowest free one. A rank that is claimed again gets the next incarnation. The
                predecessor's complete items stay, and its open fragments are discarded.
        """

    @abc.abstractmethod
    def open_segment(self, rank: int, num_envs: int) -> None:
        """Set the number of environments of the writer that claimed `rank`."""

    @abc.abstractmethod
    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Add one step of the environments `env_ids` ([B] int64, global, of one rank, none twice)."""


@runtime_checkable
class ReplayReader(Protocol):
    """The half of a replay that a Learner needs. Every method may be called from any thread.

    Attributes:
        spec: the kind of items, and how they are drawn.
    """

    spec: ReplaySpec

    @abc.abstractmethod
    def sample(self) -> Batch | None:
        """Draw a batch. Return None while there are too few items."""

    @abc.abstractmethod
    def make_dataset(self) -> Iterator[Batch]:
        """Return an endless iterator of batches, which a thread draws ahead."""

    @abc.abstractmethod
    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities ([B], not negative) of the items `keys` ([B, 3]). Count those that are gone."""

    @abc.abstractmethod
    def stats(self) -> dict[str, int]:
        """Return counters: items, steps, added, sampled, evicted, evicted_unsampled, dropped_priorities, bytes."""


# --- the base classes of buffers


class BaseReplayBuffer(ReplayWriter, ReplayReader):
    """Base class of buffers, with defaults for optional methods. See `examples/custom_replay_store.py`.

    A subclass sets `spec`, and defines `claim_rank`, `open_segment`, `add`, `sample` and `stats`.
    """

    is_saved_by_learner = False  # whether the learner calls `save(path)` and `restore(path)` for its checkpoints
    fetches_by_key = False  # whether it is a `KeyedReplayBuffer`
    _closed = False

    def end_waits(self, rank: int) -> None:
        """End each `add` of the writer `rank` that waits for room, now or later, with StoppedError: its Actor stops."""

    def forget_before(self, version: int) -> None:
        """Drop the items of a queue that parameters older than `version` acted in, now and when they come.

        They count as `evicted_unsampled`. The Learner calls this after each update that makes items too old.
        """

    def note_update(self, keys: Any, version: int) -> None:
        """Note that the Learner is at `version` after it learned from the items `keys` ([B, 3]; none at its start)."""

    def make_dataset(self, prefetch: int = 2, timeout: float | None = None) -> Dataset:
        """Return an endless iterator of batches, `prefetch` of which a thread draws ahead.

        Each `next` waits at most `timeout` seconds for its batch; None: see `Dataset`. Close the dataset (or the
        buffer) to end it.
        """
        dataset = Dataset(self, prefetch, timeout)
        self._datasets.append(dataset)
        return dataset

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Like `sample`, but wait up to `timeout` seconds for enough items. It may return None earlier."""
        batch = self.sample()
        if batch is None and not self.closed:
            time.sleep(min(timeout, _RETRY_INTERVAL))
            batch = self.sample()
        return batch

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities ([B], not negative) of the items `keys` ([B, 3]). Those that are gone are counted."""
        if self.spec.kind != "prioritized":
            raise UsageError(f"This replay buffer is {self.spec.kind}: it has no priorities to update.")
        self._set_priorities(np.asarray(keys), check_priorities(priorities, len(keys)))

    def _set_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set priorities ([B] float64, checked). A buffer that can be prioritized defines it."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The number of items that can be sampled now."""
        return self.stats()["items"]

    @property
    def closed(self) -> bool:
        """True after `close`. Then nothing is sampled any more."""
        return self._closed

    def close(self) -> None:
        """Stop the datasets. May be called again."""
        self._closed = True
        for dataset in self._datasets:
            dataset.close()
        self._datasets.clear()

    @functools.cached_property
    def _datasets(self) -> list[Any]:
        return []


class Draw(NamedTuple):
    """The items of a batch by their keys. Another process can `fetch` them.

    A key is (rank, incarnation, start): the writer of the item, and the number of the item's first timestep
    (timeline.py). In a buffer that keeps whole items, the third part is the number of the item.
    """

    keys: np.ndarray  # [B, 3] int64
    probabilities: np.ndarray  # [B] float32


class KeyedReplayBuffer(BaseReplayBuffer):
    """A buffer whose items can be drawn in one process and read in another. See `docs/data.md`."""

    fetches_by_key = True

    @abc.abstractmethod
    def draw(self, timeout: float = 0.0) -> Draw | None:
        """Draw a batch as `sample` does, but return its keys: `fetch` reads it, in this process or in another.

        The items count as sampled now. Items of a queue are not overwritten until `release`.

        Args:
            timeout: seconds to wait for enough items. It may return None earlier.
        """

    @abc.abstractmethod
    def fetch(self, keys: np.ndarray, probabilities: np.ndarray) -> Batch | None:
        """Read the items `keys` [B, 3] and `probabilities` [B] of a `Draw`. May be called again.

        Items of a uniform or prioritized buffer may have been overwritten since: other items of the batch take their
        rows, with their own keys and probabilities.

        Returns:
            The batch; None if all items (of a queue: if any item) were overwritten.
        """

    @abc.abstractmethod
    def release(self, keys: np.ndarray) -> None:
        """Release the items `keys` of a `Draw`: they were learned from, or are lost. May be called again."""


# --- drawing ahead


class DatasetTimeoutError(RlframeError, TimeoutError):
    """No batch came within the timeout."""


class Dataset(Closeable):
    """An endless iterator of batches. Use it as a context manager, or close it.

    Drawing ahead depends on timing. For results that repeat exactly, call `sample()` instead.

    Args:
        buffer: to draw from.
        prefetch: number of batches to draw ahead.
        timeout: seconds that `next` waits for a batch; None: 600, or without end in a process that is watched
            (`rlframe.interprocess.heartbeat`).
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
            DatasetTimeoutError: no batch came within the timeout.
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
                    f"No batch came within {self._timeout:g} s: the replay buffer holds {self._buffer.size} items, and "
                    f"needs {spec.min_size} and a batch of {spec.batch_size or 'one per environment'}. "
                    "Are its actors running?"
                ) from None
            if isinstance(batch, BaseException):
                self.close()
                raise batch
            return batch
        raise StopIteration

    def close(self) -> None:
        """End the thread. May be called again."""
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
                del batch  # so that its arrays can be used again as soon as the reader drops it
        except BaseException as error:  # `next` raises it
            self._put(error)
        else:
            self._stop.set()

    def _draw(self) -> Batch | None:
        """Return the next batch, or None after a while without one. Runs in the thread."""
        return self._buffer.wait_for_batch(WAKE_INTERVAL)

    def _check(self) -> None:
        """Raise if no batch can come any more. Called while the reader waits."""

    def _interrupt(self) -> None:
        """End a `_draw` that would not end by itself."""

    def _put(self, batch: Batch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(batch, timeout=WAKE_INTERVAL)
                return
            except queue.Full:
                continue


# --- the arguments of their methods


def check_keys(keys: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return copies as [B, 3] int64 and [B] float32. Raise `UsageError` if the shapes are others."""
    keys, probabilities = np.array(keys, np.int64), np.array(probabilities, np.float32)
    if keys.ndim != 2 or keys.shape[1] != 3 or not len(keys) or probabilities.shape != (len(keys),):
        raise UsageError(
            f"fetch expected keys [B, 3] and probabilities [B], as `draw` gives them; got {list(keys.shape)} and "
            f"{list(probabilities.shape)}."
        )
    return keys, probabilities


def check_priorities(priorities: np.ndarray, count: int) -> np.ndarray:
    """Return `priorities` as [count] float64. Raise `UsageError` unless they are finite and not negative."""
    priorities = np.asarray(priorities, np.float64)
    lowest, highest = priorities.min(initial=np.inf), priorities.max(initial=0.0)
    if priorities.shape != (count,) or not lowest >= 0 or not highest < np.inf:  # also where one is NaN
        raise UsageError(
            f"update_priorities expected {count} finite priorities that are not negative, one for each key; "
            f"got shape {priorities.shape}, from {lowest} to {highest}."
        )
    return priorities


def replace_evicted(batch: Any, gone: np.ndarray) -> bool:
    """Replace the rows of the arrays in `batch` that are `gone` [B] by other rows. Return False if all are gone.

    Draws are independent, so a row of the batch is as good as a new draw.
    """
    if gone.all():
        return False
    if gone.any():
        rows, others = gone.nonzero()[0], np.resize((~gone).nonzero()[0], np.count_nonzero(gone))
        for array in jax.tree_util.tree_leaves(batch):
            array[rows] = array[others]
    return True


def override(spec: ReplaySpec, overrides: dict[str, Any]) -> ReplaySpec:
    """Return `spec` with some fields replaced. Raise `UsageError` for an unknown name."""
    known = [field.name for field in dataclasses.fields(ReplaySpec)]
    for name in overrides:
        if name not in known:
            options = ", ".join(known)
            raise UsageError(f"A replay buffer has no option {name!r}; it has {options}.{suggest(name, known)}")
    return dataclasses.replace(spec, **overrides)
