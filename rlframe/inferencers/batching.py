"""Batching: simultaneous requests for actions are joined into a batch, which one call of `act` answers.

The callers' threads do all the work. While one call of `act` runs, the next batch collects requests. For example,
actors 0 and 1 send requests at the same time, with 8 rows each:

1. Actor 0 comes first, so it leads the batch: it waits until the batch may run (`_take_turn`).
2. Actor 1 joins the batch: it writes its rows after the rows of actor 0, and waits for the answer.
3. Actor 0 writes its own rows, pads the batch to one of a few sizes (here 16 rows), and calls `act` for both actors.
4. Each actor takes its part of the answer.

So a single caller needs no other thread, and many callers share one jitted call.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlframe.agents.trees import check_tree, zero_timestep
from rlframe.errors import UnavailableError, UsageError
from rlframe.transport import CALL_TIMEOUT
from rlframe.types import AgentOutput, AgentState, TimeStep, specs

Answer = tuple[AgentOutput, AgentState]

# Seconds that a call waits for its batch. The transport's timeout is longer, so the caller gets our error message.
TIMEOUT = CALL_TIMEOUT - 1.0
_SMALLEST_BUCKET = 8  # smallest padded size, in rows
_MAX_CONCURRENT_CALLS = 2  # with 1, cores would be idle between two jitted calls


class Batcher:
    """Answers concurrent calls with one call of `act(env_ids, timestep, state)` on the rows of all calls.

    Batches are padded to a few sizes, so that `act` is compiled for few shapes. The padding contains rows of earlier
    calls. The padding does not change any answer if the agent acts on each row independently.

    Args:
        agent: the agent whose specs the requests must match.
        act: returns (output, state) as numpy arrays of [rows, ...]. Two threads may call it at the same time.
        max_rows: maximum number of rows in one call of `act`. A single larger request is still answered.
        max_wait: seconds to wait for more requests; 0 means that a batch does not wait.
        timeout: seconds after which a waiting call is refused.
    """

    def __init__(
        self,
        agent: Any,
        act: Callable[[np.ndarray, TimeStep, AgentState], Answer],
        max_rows: int,
        max_wait: float,
        timeout: float = TIMEOUT,
    ) -> None:
        self._agent, self._act = agent, act
        self._max_rows, self._max_wait, self._timeout = max_rows, max_wait, timeout
        template = zero_timestep(agent.observation_spec, 1), agent.initial_state(1)
        self._spec = jax.tree.map(lambda leaf: specs.Array(leaf.shape[1:], leaf.dtype), template)
        leaf_specs, self._treedef = jax.tree.flatten(self._spec)
        self._leaf_specs = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaf_specs]
        self._changed = threading.Condition()  # guards all attributes below
        self._waiting_batches: collections.deque[_Batch] = collections.deque()  # oldest first
        self._running_batches: list[_Batch] = []  # batches for which `act` runs now
        self._free_arrays: list[list[np.ndarray]] = []  # arrays of finished batches
        self._stopped = ""  # reason why the Batcher was stopped; empty while it is not stopped
        self.counts = {"requests": 0, "calls": 0, "rows": 0, "padding_rows": 0}

    def __call__(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> Answer:
        """Return the result of `act` for this request. Any number of threads may call this method at the same time.

        Raises:
            UsageError: the arrays do not match the agent's specs. Other calls are not affected.
            UnavailableError: the batch of this call did not start in time, or the Batcher was stopped.
        """
        leaves, rows = self._check(env_ids, timestep, state)
        with self._changed:
            if self._stopped:
                raise UnavailableError(self._stopped)
            batch = self._batch_with_room(rows)
            leads, start = not batch.requests, batch.join(rows)
            if not leads and len(self._waiting_batches) == 1:
                self._changed.notify_all()  # this request may have made the batch large enough to run
        if leads:
            self._lead(batch, env_ids, leaves, rows)
        else:
            batch.write(leaves, start, rows)
            with self._changed:
                batch.unwritten -= 1
                if not batch.unwritten:
                    self._changed.notify_all()
            if not batch.done.wait(self._timeout):  # can time out while `act` compiles
                raise UnavailableError(self._timeout_message)
        if batch.error is not None:
            raise batch.error
        answer = batch.part(start, rows)
        with self._changed:
            batch.unread -= 1
            if not batch.unread and batch.capacity == self._max_rows:
                self._free_arrays.append(batch.leaves)
        return answer

    @property
    def waiting(self) -> int:
        """Number of calls in batches that do not run yet."""
        with self._changed:
            return sum(batch.requests for batch in self._waiting_batches)

    def stop(self, why: str) -> None:
        """Refuse all calls that wait, and all later calls. Calls in a running batch are still answered."""
        with self._changed:
            self._stopped = why
            for batch in self._waiting_batches:
                batch.fail(UnavailableError(why))
            self._waiting_batches.clear()
            self._changed.notify_all()

    @property
    def _timeout_message(self) -> str:
        return f"The inference service was busy for {self._timeout:g} s. Call again."

    def _check(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> tuple[list[np.ndarray], int]:
        leaves, treedef = jax.tree.flatten((timestep, state))
        rows = len(env_ids)
        if treedef != self._treedef or any(
            leaf.dtype != dtype or leaf.shape != (rows, *shape)
            for leaf, (shape, dtype) in zip(leaves, self._leaf_specs, strict=True)
        ):
            self._agent.check_observation(timestep.observation)
            check_tree("(timestep, state)", self._spec, (timestep, state), owner=self._agent.type_name)
            sizes = sorted({len(leaf) for leaf in leaves})
            raise UsageError(
                f"inference() got {rows} env_ids, but arrays with {sizes} rows: the numbers must be equal."
            )
        return leaves, rows

    def _batch_with_room(self, rows: int) -> _Batch:
        """Return the newest batch if it has room for this number of rows, else a new batch."""
        if self._waiting_batches and self._waiting_batches[-1].has_room(rows):
            return self._waiting_batches[-1]
        capacity = max(self._max_rows, bucket_of(rows, self._max_rows))
        if capacity == self._max_rows and self._free_arrays:
            leaves = self._free_arrays.pop()
        else:
            leaves = [np.zeros((capacity, *shape), dtype) for shape, dtype in self._leaf_specs]
        if self._waiting_batches:
            self._changed.notify_all()  # the previous batch is full, so it does not wait for more rows
        self._waiting_batches.append(_Batch(leaves, self._max_rows))
        return self._waiting_batches[-1]

    def _lead(self, batch: _Batch, env_ids: np.ndarray, leaves: list[np.ndarray], rows: int) -> None:
        """Wait until the batch may run. Then call `act` for it."""
        if not self._take_turn(batch):
            return
        try:
            bucket = bucket_of(batch.rows, self._max_rows)
            counts = {
                "requests": batch.requests,
                "calls": 1,
                "rows": batch.rows,
                "padding_rows": bucket - batch.rows,
            }
            with self._changed:
                self.counts = {name: count + counts[name] for name, count in self.counts.items()}
            if batch.requests > 1 or bucket > rows:
                batch.write(leaves, 0, rows)
                leaves = [leaf[:bucket] for leaf in batch.leaves]
            with self._changed:
                self._changed.wait_for(lambda: not batch.unwritten)
            batch.answer = self._act(env_ids, *self._treedef.unflatten(leaves))
        except BaseException as error:
            batch.error = error
        finally:
            with self._changed:
                self._running_batches.remove(batch)
                self._changed.notify_all()
            batch.done.set()

    def _take_turn(self, batch: _Batch) -> bool:
        """Wait until the batch may run. Return True then, or False if the batch failed while it waited."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: batch.error is not None or self._is_ready_to_run(batch), self._timeout
            )
            if batch.error is None and not came:
                self._waiting_batches.remove(batch)
                batch.fail(UnavailableError(self._timeout_message))
                self._changed.notify_all()
            if batch.error is not None:
                return False
            if self._max_wait:
                self._changed.wait_for(lambda: not batch.has_room(1) or len(self._waiting_batches) != 1, self._max_wait)
                if batch.error is not None:  # the Batcher was stopped
                    return False
            self._waiting_batches.popleft()  # after this line, no call joins the batch
            self._running_batches.append(batch)
        return True

    def _is_ready_to_run(self, batch: _Batch) -> bool:
        """Return True if this is the oldest batch and may run now.

        While another batch runs, this batch may start in two cases: it has at least the running batch's number of rows,
        or a newer batch waits behind it. Reason: the callers of one batch get their answers together, and call again at
        almost the same time. The first of these calls should wait for the others, instead of starting a small batch.
        """
        if self._waiting_batches[0] is not batch or len(self._running_batches) >= _MAX_CONCURRENT_CALLS:
            return False
        return len(self._waiting_batches) > 1 or all(batch.rows >= other.rows for other in self._running_batches)


class _Batch:
    """Calls that are answered by one call of `act`, and the memory for their rows.

    Attributes:
        leaves: one array [capacity, ...] for each leaf of a request.
        rows, requests: number of rows, and number of requests, in the batch.
        unwritten: number of requests whose rows are not written yet. The leader's request is not counted.
        unread: number of requests whose caller has not taken the answer yet.
    """

    __slots__ = (
        "_max_rows",
        "answer",
        "capacity",
        "done",
        "error",
        "leaves",
        "requests",
        "rows",
        "unread",
        "unwritten",
    )

    def __init__(self, leaves: list[np.ndarray], max_rows: int) -> None:
        self.leaves, self.capacity, self._max_rows = leaves, len(leaves[0]), max_rows
        self.rows = self.requests = self.unread = 0
        self.unwritten = -1  # -1, so that it is 0 after the leader's `join`
        self.answer: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def has_room(self, rows: int) -> bool:
        return self.rows + rows <= self._max_rows

    def join(self, rows: int) -> int:
        """Add a request with `rows` rows to the batch. Return the index of its first row."""
        start = self.rows
        self.rows += rows
        self.requests += 1
        self.unwritten += 1
        self.unread += 1
        return start

    def write(self, leaves: list[np.ndarray], start: int, rows: int) -> None:
        for here, leaf in zip(self.leaves, leaves):
            here[start : start + rows] = leaf

    def part(self, start: int, rows: int) -> Answer:
        """Return the answer for the rows from `start` to `start + rows - 1`."""
        output, state = self.answer
        if self.requests == 1 and rows == len(jax.tree.leaves(output.action)[0]):
            return self.answer
        # Copy, because `act` may return views of this batch's memory, which later batches overwrite.
        action, extras, state = jax.tree.map(
            lambda leaf: leaf[start : start + rows].copy(), (output.action, output.extras, state)
        )
        return AgentOutput(action, extras, output.params_version), state

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()


def bucket_of(rows: int, max_rows: int) -> int:
    """Return the size to which a batch of `rows` rows is padded: 8, 12, 16, 24, 32, 48 and so on.

    The size is at most `max_rows`, unless `rows` is larger.
    """
    power = max(_SMALLEST_BUCKET, 1 << (rows - 1).bit_length())
    between = power * 3 // 4  # with powers of two only, a third of all rows was padding
    bucket = between if rows <= between and power > _SMALLEST_BUCKET else power
    return max_rows if rows <= max_rows < bucket else bucket
