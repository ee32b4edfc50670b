"""Batching: calls that come at the same time are answered by one.

There is no thread of its own. The first caller that finds the device free answers for everyone who waits; when it is
done, the next one that waits does. So a lone caller pays for no hand-over, and many share a jitted call.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlframe.agents.base import check_tree, zero_timestep
from rlframe.errors import UnavailableError, UsageError
from rlframe.handles import CALL_TIMEOUT
from rlframe.types import AgentOutput, AgentState, TimeStep, specs

Answer = tuple[AgentOutput, AgentState]

TIMEOUT = CALL_TIMEOUT - 1.0  # seconds that a call waits for its turn, so that its caller hears why it got none
_SMALLEST_BUCKET = 8  # rows


class Batcher:
    """Makes one function of concurrent calls: `act(env_ids, timestep, state)` on all their rows.

    Rows are padded to a few sizes, so that `act` is compiled a bounded number of times. What lies in the padding is
    of earlier calls, and no row's answer depends on it where the agent acts on each row alone.

    Args:
        agent: says what a request looks like.
        act: gives (output, state), numpy, `[rows, ...]`. It is called by one thread at a time.
        max_rows: that one call of `act` answers, unless a single request holds more.
        max_wait: seconds to wait for more requests than are there; 0 takes those that are.
        timeout: seconds after which a call that nobody had time for is refused.
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
        self._rows: list[np.ndarray] = []  # [largest bucket so far, ...] for each leaf
        self._lock = threading.Lock()
        self._waiting: collections.deque[_Request] = collections.deque()
        self._waiting_rows = 0
        self._wanted = max_rows  # rows that the one who waits for more would like to have
        self._enough = threading.Event()  # that they are there
        self._busy = False  # somebody answers
        self._stopped = ""  # why
        self.counts = {"requests": 0, "calls": 0, "rows": 0, "padding_rows": 0}

    def __call__(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> Answer:
        """As `act`. Any number of threads may call it.

        Raises:
            UsageError: the arrays are not what the agent's specs say; no other call is touched by that.
            UnavailableError: the turn of this call did not come in time, or the Batcher was stopped.
        """
        request = self._check(env_ids, timestep, state)
        with self._lock:
            if self._stopped:
                raise UnavailableError(self._stopped)
            leads = not self._busy
            self._busy = True
            if not leads:
                self._waiting.append(request)
                self._waiting_rows += request.rows
                if self._max_wait and self._waiting_rows >= self._wanted:
                    self._enough.set()
        if leads or self._wait(request):
            self._lead(request)
        if request.error is not None:
            raise request.error
        return request.answer

    def stop(self, why: str) -> None:
        """Refuses every call that waits and all that come; the one under way is answered."""
        with self._lock:
            self._stopped = why
            for request in self._waiting:
                request.error = UnavailableError(why)
                request.woken.release()
            self._waiting.clear()
            self._waiting_rows = 0

    def _check(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> _Request:
        leaves, treedef = jax.tree.flatten((timestep, state))
        rows = len(env_ids)
        if treedef != self._treedef or any(
            leaf.dtype != dtype or leaf.shape != (rows, *shape)
            for leaf, (shape, dtype) in zip(leaves, self._leaf_specs, strict=True)
        ):
            self._agent.check_observation(timestep.observation)
            check_tree("(timestep, state)", self._spec, (timestep, state), owner=type(self._agent).__name__)
            sizes = sorted({len(leaf) for leaf in leaves})
            raise UsageError(f"inference() got {rows} env_ids, but arrays of {sizes} rows: one of each is needed.")
        return _Request(env_ids, leaves, rows)

    def _wait(self, request: _Request) -> bool:
        """Waits to be answered, or to be the next to answer (True)."""
        if not request.woken.acquire(timeout=self._timeout):
            with self._lock:
                if request in self._waiting:
                    self._waiting.remove(request)
                    self._waiting_rows -= request.rows
                # It may be in the call under way, which compiles for longer: that answer will be dropped.
                if not request.leads and request.answer is None and request.error is None:
                    raise UnavailableError(f"The inference service was busy for {self._timeout:g} s. Call again.")
        return request.leads

    def _lead(self, request: _Request) -> None:
        if self._max_wait:
            with self._lock:
                self._wanted = self._max_rows - request.rows
                self._enough.clear()
                enough = self._waiting_rows >= self._wanted
            if not enough:
                self._enough.wait(self._max_wait)
        batch = self._take(request)
        try:
            self._answer(batch)
        except BaseException as error:
            for one in batch:
                one.error = error
        finally:
            with self._lock:
                self._busy = bool(self._waiting)
                if self._busy:
                    follower = self._waiting.popleft()
                    self._waiting_rows -= follower.rows
                    follower.leads = True
                    follower.woken.release()
            for one in batch[1:]:
                one.woken.release()

    def _take(self, request: _Request) -> list[_Request]:
        batch, rows = [request], request.rows
        with self._lock:
            while self._waiting and rows + self._waiting[0].rows <= self._max_rows:
                batch.append(self._waiting.popleft())
                rows += batch[-1].rows
                self._waiting_rows -= batch[-1].rows
        return batch

    def _answer(self, batch: list[_Request]) -> None:
        rows = sum(request.rows for request in batch)
        bucket = bucket_of(rows, self._max_rows)
        alone = len(batch) == 1 and bucket == rows
        leaves = batch[0].leaves if alone else self._gather(batch, bucket)
        timestep, state = self._treedef.unflatten(leaves)
        output, state = self._act(batch[0].env_ids, timestep, state)
        for name, count in (("requests", len(batch)), ("calls", 1), ("rows", rows), ("padding_rows", bucket - rows)):
            self.counts[name] += count
        if alone:
            batch[0].answer = output, state
            return
        answers, treedef = jax.tree.flatten((output.action, output.extras, state))
        start = 0
        for request in batch:
            # Copies: a leaf that `act` only passed on may be the very rows that the next batch is gathered in.
            own = [leaf[start : start + request.rows].copy() for leaf in answers]
            action, extras, state = treedef.unflatten(own)
            request.answer = AgentOutput(action, extras, output.params_version), state
            start += request.rows

    def _gather(self, batch: list[_Request], bucket: int) -> list[Any]:
        if not self._rows or len(self._rows[0]) < bucket:
            self._rows = [np.zeros((bucket, *shape), dtype) for shape, dtype in self._leaf_specs]
        for i, rows in enumerate(self._rows):
            start = 0
            for request in batch:
                rows[start : start + request.rows] = request.leaves[i]
                start += request.rows
        return [rows[:bucket] for rows in self._rows]


class _Request:
    """A call that waits for its answer, or for its turn to give answers."""

    __slots__ = ("answer", "env_ids", "error", "leads", "leaves", "rows", "woken")

    def __init__(self, env_ids: np.ndarray, leaves: list[Any], rows: int) -> None:
        self.env_ids, self.leaves, self.rows = env_ids, leaves, rows
        self.answer: Any = None
        self.error: BaseException | None = None
        self.leads = False
        self.woken = threading.Lock()
        self.woken.acquire()


def bucket_of(rows: int, max_rows: int) -> int:
    """The size that `rows` are padded to: a power of two, at least 8, or `max_rows`; what is larger, the next power."""
    bucket = max(_SMALLEST_BUCKET, 1 << (rows - 1).bit_length())
    return max_rows if rows <= max_rows < bucket else bucket
