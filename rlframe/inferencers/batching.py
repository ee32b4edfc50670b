"""Batching: calls that come at the same time are answered by one.

The callers' threads do all the work. While one call of `act` is under way, the next round gathers: actors 0 and 1 call
at the same time, with 8 rows each.

1. Actor 0 comes first, so it leads the round: it waits for the turn of the round (`_take_turn`).
2. Actor 1 joins the round: it writes its rows behind those of actor 0, and waits for the answer.
3. Actor 0 writes its own rows, pads them to a size that is compiled already (16), and calls `act` for both.
4. Each takes its part of the answer.

So a caller that is alone hands nothing over, and many share a jitted call.
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

TIMEOUT = CALL_TIMEOUT - 1.0  # seconds that a call waits for its turn, so that its caller hears why it got none
_SMALLEST_BUCKET = 8  # rows
_MAX_CONCURRENT_CALLS = 2  # calls under way: one alone leaves cores idle before and after its jitted call


class Batcher:
    """Answers concurrent calls by one call of `act(env_ids, timestep, state)` on all their rows.

    Rows are padded to a few sizes, so that `act` is compiled a bounded number of times. The padding holds rows of
    earlier calls. No row's answer depends on it if the agent acts on each row alone.

    Args:
        agent: its specs are those of a request.
        act: returns (output, state), numpy, `[rows, ...]`. Two threads may call it at the same time.
        max_rows: that one call of `act` answers, unless a single request holds more.
        max_wait: seconds to wait for more requests; 0: take those that are there.
        timeout: seconds after which a call whose turn has not come is refused.
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
        self._changed = threading.Condition()  # guards all that follows
        self._waiting_batches: collections.deque[_Batch] = (
            collections.deque()
        )  # that wait for their turn, the oldest first
        self._running_batches: list[_Batch] = []  # that have had their turn and are not over
        self._free_arrays: list[list[np.ndarray]] = []  # memory of rounds that are over
        self._stopped = ""  # why
        self.counts = {"requests": 0, "calls": 0, "rows": 0, "padding_rows": 0}

    def __call__(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> Answer:
        """As `act`. Any number of threads may call it.

        Raises:
            UsageError: the arrays do not match the agent's specs. Other calls are answered.
            UnavailableError: the turn of this call did not come in time, or the Batcher was stopped.
        """
        leaves, rows = self._check(env_ids, timestep, state)
        with self._changed:
            if self._stopped:
                raise UnavailableError(self._stopped)
            batch = self._batch_with_room(rows)
            leads, start = not batch.requests, batch.join(rows)
            if not leads and len(self._waiting_batches) == 1:
                self._changed.notify_all()  # it may be large enough now
        if leads:
            self._lead(batch, env_ids, leaves, rows)
        else:
            batch.write(leaves, start, rows)
            with self._changed:
                batch.unwritten -= 1
                if not batch.unwritten:
                    self._changed.notify_all()
            if not batch.done.wait(self._timeout):  # in the call under way, perhaps, which compiles for longer
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
        """Calls that wait for their turn."""
        with self._changed:
            return sum(batch.requests for batch in self._waiting_batches)

    def stop(self, why: str) -> None:
        """Refuse every call that waits, and all later ones. Those under way are answered."""
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
            raise UsageError(f"inference() got {rows} env_ids, but arrays of {sizes} rows: one of each is needed.")
        return leaves, rows

    def _batch_with_room(self, rows: int) -> _Batch:
        """Return the youngest round if it has room for so many rows, else a new one."""
        if self._waiting_batches and self._waiting_batches[-1].has_room(rows):
            return self._waiting_batches[-1]
        capacity = max(self._max_rows, bucket_of(rows, self._max_rows))
        if capacity == self._max_rows and self._free_arrays:
            leaves = self._free_arrays.pop()
        else:
            leaves = [np.zeros((capacity, *shape), dtype) for shape, dtype in self._leaf_specs]
        if self._waiting_batches:
            self._changed.notify_all()  # the one before is full: nobody need wait for more
        self._waiting_batches.append(_Batch(leaves, self._max_rows))
        return self._waiting_batches[-1]

    def _lead(self, batch: _Batch, env_ids: np.ndarray, leaves: list[np.ndarray], rows: int) -> None:
        """Make the call for a round when its turn comes."""
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
        """Wait until the round's turn has come. Return False if the round failed meanwhile."""
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
                if batch.error is not None:  # stopped
                    return False
            self._waiting_batches.popleft()  # nobody joins it from here on
            self._running_batches.append(batch)
        return True

    def _is_ready_to_run(self, batch: _Batch) -> bool:
        """Return True if it is the oldest round, and there is room for its call.

        Beside a running round it must be as large as that one, unless another round waits behind it: callers come back
        together, and the first of them should not go on without the others.
        """
        if self._waiting_batches[0] is not batch or len(self._running_batches) >= _MAX_CONCURRENT_CALLS:
            return False
        return len(self._waiting_batches) > 1 or all(batch.rows >= other.rows for other in self._running_batches)


class _Batch:
    """Calls that are answered together, and the memory that their rows are in.

    Attributes:
        leaves: of a request, [capacity, ...] each.
        rows, requests: that have joined.
        unwritten: requests whose rows are still to be written, without the first one's: the leader writes those.
        unread: requests that have not taken their answer yet.
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
        self.unwritten = -1  # `join` counts the leader's request too
        self.answer: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def has_room(self, rows: int) -> bool:
        return self.rows + rows <= self._max_rows

    def join(self, rows: int) -> int:
        """Make room for a request. Return where its rows begin."""
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
        """Return the answer to the rows from `start` on."""
        output, state = self.answer
        if self.requests == 1 and rows == len(jax.tree.leaves(output.action)[0]):
            return self.answer
        # Copies: a leaf that `act` only passed on is this memory, which is used again.
        action, extras, state = jax.tree.map(
            lambda leaf: leaf[start : start + rows].copy(), (output.action, output.extras, state)
        )
        return AgentOutput(action, extras, output.params_version), state

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()


def bucket_of(rows: int, max_rows: int) -> int:
    """Return the size that `rows` are padded to: 8, 12, 16, 24, 32, 48 and so on.

    It is `max_rows` at most, unless there are more rows than that.
    """
    power = max(_SMALLEST_BUCKET, 1 << (rows - 1).bit_length())
    between = power * 3 // 4  # with powers of two alone, padding was a third of all rows
    bucket = between if rows <= between and power > _SMALLEST_BUCKET else power
    return max_rows if rows <= max_rows < bucket else bucket
