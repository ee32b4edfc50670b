"""The replay buffer for the processes of one machine. The processes exchange experience through shared memory.

Each writer owns a segment (a ring of slots), and writes to it without a lock. A reader copies data, and then checks
that no writer has overwritten the data during the copy. See `docs/understand/items.md`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from rlframe.errors import UsageError
from rlframe.interprocess.memory import SharedArrays
from rlframe.interprocess.processes import this_process
from rlframe.replay import steps
from rlframe.replay.base import Draw, KeyedReplayBuffer, check_keys, override, replace_evicted
from rlframe.replay.rate_limiter import ROUNDS_AHEAD
from rlframe.replay.shared_memory import block, segment_writers
from rlframe.replay.shared_memory.block import BufferMemory
from rlframe.replay.shared_memory.sampler import Sampler
from rlframe.replay.shared_memory.segment_reader import SegmentReader
from rlframe.replay.shared_memory.segment_writers import BufferPlan, SegmentWriters
from rlframe.types import Batch, Step

_T = TypeVar("_T")
_pickled_buffers: set[SharedMemReplayBuffer] = (
    set()
)  # buffers that this process created and pickled; kept alive because other processes may open the copies later


class SharedMemReplayBuffer(KeyedReplayBuffer):
    """A replay buffer in the shared memory of one machine. Pass it (pickled) to actors and to the learner.

    The process that creates the buffer must stay alive until all other processes have opened it. The first process that
    samples becomes the sampler. The sampler sets the priorities, and takes items from a queue. Other processes can only
    sample uniformly.

    If a writer is not in the sampler's process, `add` can wait. It waits while the next step would overwrite unsampled
    items of a queue. It also waits while the writer is more than `rounds_ahead` rounds ahead of `samples_per_insert`.
    A writer in the sampler's process never waits, as in the in-process buffer. Before a process samples, writers in the
    process that created the buffer do not wait.

    Args:
        agent: an Agent, or any object with `replay_spec` and `step_spec`.
        num_writers: number of actors. The buffer keeps each actor's newest `capacity / num_writers` timesteps.
        seed: seed of the random draws.
        max_envs: maximum number of environments of one writer. A high value uses address space, but no memory.
        timeout: maximum number of seconds that `add` waits.
        in_threads: True if writers are threads of the sampler's process. Then these writers also wait for the sampler.
        rounds_ahead: maximum lead of the writers over `samples_per_insert`. The unit is rounds. A round is a batch, or
            one step of all environments.
        elastic_writers: True if batches of one item per environment need no items from writers that have not started.
        overrides: fields of `ReplaySpec` to change.

    Raises:
        UsageError: an option is unknown, or there is not enough memory.
    """

    is_saved_by_learner = True
    _created: SharedArrays | None = None  # the memory that this object created; None in a pickled copy

    def __init__(
        self,
        agent: Any,
        *,
        num_writers: int = 1,
        seed: int = 0,
        max_envs: int = 1024,
        timeout: float = 600.0,
        in_threads: bool = False,
        rounds_ahead: int = ROUNDS_AHEAD,
        elastic_writers: bool = False,
        **overrides: Any,
    ):
        for option, value in (("num_writers", num_writers), ("max_envs", max_envs), ("rounds_ahead", rounds_ahead)):
            if value < 1:
                raise UsageError(f"SharedMemReplayBuffer's {option} must be at least 1, got {value}.")
        spec = override(agent.replay_spec, overrides)
        steps.check_fits(spec, agent.step_spec, spec.capacity)
        rows = block.segment_rows(spec, num_writers, max_envs)
        self._created = block.create(num_writers, rows, spec, agent.step_spec)
        name, waits = self._created.name, (timeout, in_threads, rounds_ahead, elastic_writers)
        self.__setstate__(BufferPlan(name, spec, agent.step_spec, num_writers, max_envs, rows, seed, *waits))

    def __getstate__(self) -> BufferPlan:
        if this_process() == self._plan.name.creator:
            _pickled_buffers.add(self)
        return self._plan

    def __setstate__(self, plan: BufferPlan) -> None:
        self.spec, self._plan = plan.spec, plan
        self._own_view: _ProcessView | None = None

    def _view(self) -> _ProcessView:
        """Return this process's view of the buffer. All copies of the buffer in one process share one view."""
        if self._own_view is None:
            with _views_lock:
                found = _views.get(self._plan.name.token)
                if found is None:
                    found = _views[self._plan.name.token] = _ProcessView(self._plan)
                self._own_view = found
        return self._own_view

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[Sampler]:
        """Make this process the sampler, and hold the view's lock. Raise `UsageError` if another process samples."""
        view = self._view()
        with view.lock:
            view.sampler.require_sampler()
            yield view.sampler

    # --- writing

    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        """Register a writer, as `BaseReplayBuffer` describes.

        A rank is free if no process has claimed it, or if the process that claimed it has exited.

        Raises:
            UsageError: no rank is free, or a running process has claimed `rank`.
            BufferGoneError: the process that created the buffer has exited.
        """
        return self._view().writers.claim(num_envs, rank)

    def open_segment(self, rank: int, num_envs: int) -> None:
        view = self._view()
        with view.lock, view.memory.claims():
            view.writers.open(rank, num_envs)

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Add one step of the environments `env_ids`, as `BaseReplayBuffer` describes.

        This method can wait. The docstring of this class describes when.

        Raises:
            WriterTimeoutError: the method has waited for `timeout` seconds.
            BufferGoneError: the process that created the buffer exited during the wait.
            StoppedError: `end_waits` was called.
        """
        (self._own_view or self._view()).writers.add(env_ids, step)

    def end_waits(self, rank: int) -> None:
        """See `BaseReplayBuffer`."""
        self._view().writers.end_waits(rank)

    # --- reading

    def forget_before(self, version: int) -> None:
        """See `BaseReplayBuffer`. Call this method in the sampler's process."""
        if self.spec.kind == "queue":
            with self._sampling() as sampler:
                sampler.forget_before(version)

    def sample(self) -> Batch | None:
        """Draw a batch. Return None if fewer than `min_size` items were added, or if a queue has too few items.

        The caller owns the batch's arrays. The buffer reuses a large array only when nothing refers to it anymore.

        Raises:
            UsageError: another process samples this queue.
        """
        view = self._view()
        with view.lock:
            view.sampler.choose_role()
            return None if self._closed else view.sampler.sample()

    def draw(self, timeout: float = 0.0) -> Draw | None:
        """See `KeyedReplayBuffer`. Call this method in the sampler's process.

        Raises:
            UsageError: another process samples.
        """
        return self._wait_for(self._draw, timeout)

    def _draw(self) -> Draw | None:
        with self._sampling() as sampler:
            return None if self._closed else sampler.draw()

    def fetch(self, keys: np.ndarray, probabilities: np.ndarray) -> Batch | None:
        """See `KeyedReplayBuffer`. Any process may call this method without becoming the sampler.

        Drawn items of a queue are overwritten in only two cases. A new sampler process has replaced the old one, or the
        writer is in the sampler's process, where writers do not wait.
        """
        keys, probabilities = check_keys(keys, probabilities)
        view = self._view()
        with view.fetch_lock:
            batch, evicted = view.fetcher.fetch(keys, probabilities)
        if self.spec.kind == "queue":
            return None if evicted.any() else batch
        return batch if replace_evicted(batch, evicted) else None

    def release(self, keys: np.ndarray) -> None:
        """See `KeyedReplayBuffer`. Call this method in the sampler's process."""
        if self.spec.kind == "queue":
            with self._sampling() as sampler:
                sampler.release(keys)

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Wait up to `timeout` seconds for a sufficient number of items. Then return the result of `sample`."""
        return self._wait_for(self.sample, timeout)

    def _wait_for(self, take: Callable[[], _T | None], timeout: float) -> _T | None:
        """Call `take` until it returns a result, or until about `timeout` seconds have passed. Then return None."""
        result = take()
        if result is not None or timeout <= 0 or self.closed:
            return result
        view = self._view()
        memory = view.memory
        value = memory.added.value
        with view.lock:
            memory.control[block.WAKE_AT] = view.sampler.inserts_needed()
        try:
            result = take()  # writers may have added the items just before WAKE_AT was set; they do not wake us
            if result is not None:
                return result
            memory.added.wait(value, timeout)
        finally:
            memory.control[block.WAKE_AT] = block.NEVER
        return take()

    def _set_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        with self._sampling() as sampler:
            sampler.update_priorities(keys, priorities)

    @property
    def size(self) -> int:
        view = self._view()
        with view.lock:
            return view.sampler.size

    def stats(self) -> dict[str, int]:
        view = self._view()
        with view.lock:
            slots = sum(header[block.SLOTS] for header in view.memory.headers)
            return view.sampler.stats(steps.bytes_needed(self.spec, self._plan.step_spec, slots))

    @property
    def closed(self) -> bool:
        """True if this object was closed, or if it is a copy of a closed buffer. A closed buffer returns no batches."""
        return self._closed or (self._own_view is not None and self._own_view.memory.closed)

    def close(self) -> None:
        """Stop the datasets.

        If this process created the buffer, also end sampling and waiting in all other processes.
        """
        if self._created is not None:
            self._created.close()
            _pickled_buffers.discard(self)
        super().close()

    # --- disk

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write items, priorities, counters and the random state to the file `path`.

        Call this method in the sampler's process. Writers continue during the save. If a writer overwrites an item
        during the save, the file does not contain this item.

        Raises:
            CheckpointError: the file could not be written. The old file is unchanged.
            UsageError: another process samples.
        """
        with self._sampling() as sampler:
            segment_writers.save(path, self._view().memory, sampler, self.spec)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Continue from a saved buffer. Call this method in the sampler's process, before any writer adds steps.

        If only the learner restarted, the buffer still has its items. Then only the priorities are restored.

        Raises:
            CheckpointError: the file is missing, damaged or from another agent, or writers have already added steps.
            UsageError: another process samples.
        """
        memory = self._view().memory
        with self._sampling() as sampler, memory.claims():
            segment_writers.restore(path, memory, sampler, self.spec)


class _ProcessView:
    """One process's access to a buffer: the mapped memory, the writers and the sampler of this process.

    Attributes:
        lock: this process holds the lock while it adds or samples. While it waits, it does not hold the lock.
        fetch_lock: this process holds the lock while `fetcher` reads items by their keys.
    """

    def __init__(self, plan: BufferPlan) -> None:
        spec, step_spec = plan.spec, plan.step_spec
        self.memory = BufferMemory(plan.name, plan.num_writers, plan.rows, spec, step_spec)
        self.lock, self.fetch_lock = threading.RLock(), threading.Lock()
        self.writers = SegmentWriters(plan, self.memory, self.lock)
        self.sampler = Sampler(self.memory, spec, step_spec, plan.seed, elastic_writers=plan.elastic_writers)
        self.fetcher = SegmentReader(self.memory, spec, step_spec, "uniform")  # its table stays empty


_views_lock = threading.Lock()
_views: weakref.WeakValueDictionary[int, _ProcessView] = weakref.WeakValueDictionary()  # memory token -> view
