"""A process's side of a replay that is held by nodes. Steps are gathered while those before them travel."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlframe.errors import StoppedError, UsageError
from rlframe.handles import resolve
from rlframe.interprocess.heartbeat import peer_timeout
from rlframe.interprocess.phases import waiting_for
from rlframe.replay.base import BaseReplayBuffer, ReplayClosedError
from rlframe.replay.layout import check_added, check_step, step_layouts
from rlframe.replay.rate_limiter import ROUNDS_AHEAD, items_of_rounds
from rlframe.replay.service.server import SendBuffer, WriterId
from rlframe.replay.steps import Writers
from rlframe.types import AgentSpecs, Batch, Step, global_env_ids

_MAX_STEPS, _MAX_BYTES = 256, 16 * 2**20  # that are gathered, and sent at once
_WARN_AFTER = 60.0  # seconds that a writer is held back; a learner may compile meanwhile
_STOP_CHECK_INTERVAL = 0.2  # seconds between two looks at whether to stop
_DEADLINE = 120.0  # seconds that a service which does not answer is waited for
_RETRY_INTERVAL = 0.01  # seconds between two looks at several shards of which none has a batch
_WEIGHT_INTERVAL = 0.2  # seconds between two looks at how much each shard holds

_log = logging.getLogger(__name__)


class StepSender:
    """Sends the steps of one writer in order, by a thread, one message at a time.

    Args:
        service: a `ReplayService`, or what calls one.
        writer: whose steps they are.
        most_steps: that may be on their way; None: 256. Samples are owed for those too.

    Attributes:
        rank, num_envs, id_bytes: see `Writer`.
        checked: whether a step has the shapes and dtypes that it should.
    """

    def __init__(self, service: Any, writer: WriterId, max_steps: int | None = None) -> None:
        self._service, self._writer = service, writer
        self.rank, self.num_envs = writer.rank, writer.num_envs
        self.id_bytes = global_env_ids(writer.rank, np.arange(writer.num_envs)).tobytes()
        self._step_limit = _MAX_STEPS if max_steps is None else min(max_steps, _MAX_STEPS)
        self.checked = False
        self._changed = threading.Condition()
        self._buffers: collections.deque[SendBuffer] = collections.deque()  # of steps that have yet to arrive
        self._waiting = self._bytes = 0  # these steps
        self._number = 0  # of the first one
        self._held_back_reason = ""  # the service holds the writer back
        self._error: BaseException | None = None
        self._is_stopped = self._closed = False
        threading.Thread(target=self._run, name="rlframe replay outbox", daemon=True).start()

    def put(self, env_ids: np.ndarray, step: Step) -> None:
        """Take a step; wait while too many are there, or one is held back. Raise what became of those before."""
        with self._changed:
            self._wait(self._has_room)
            if not self._buffers or not self._buffers[-1].accepts(env_ids, step):
                self._buffers.append(SendBuffer(env_ids, step, self._buffers[-1] if self._buffers else None))
            send_buffer = self._buffers[-1]
            send_buffer.put(step)
            self._waiting += 1
            self._bytes += send_buffer.nbytes
            if self._waiting == 1:
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until the service has everything."""
        self._wait(lambda: not self._waiting)

    def settle(self) -> None:
        """Wait until the service has everything, or holds the writer back."""
        self._wait(lambda: not self._waiting or bool(self._held_back_reason))

    def end_waits(self) -> None:
        """End a `put` that waits, now or later, with StoppedError."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Send no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return not self._held_back_reason and self._waiting < self._step_limit and self._bytes < _MAX_BYTES

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ReplayClosedError("The replay buffer is closed.")

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until `is_over()`, which is called with the lock. Raise as `put`."""
        with self._changed:
            self._check()
            if not is_over():
                self._sleep_until(is_over)

    def _sleep_until(self, is_over: Callable[[], bool]) -> None:
        """Sleep until `is_over()`. Warn once if the service holds the writer back for long."""
        began, warned = time.monotonic(), False
        with waiting_for("the replay service"):
            while not is_over():
                self._check()
                if self._is_stopped:
                    raise StoppedError(
                        f"Told to stop while the replay service held back the writer {self._writer.rank}."
                    )
                if not warned and self._held_back_reason and time.monotonic() > began + _WARN_AFTER:
                    warned = True
                    _log.warning(
                        "The replay service holds back the writer %d: %s. (A thread that both adds and samples needs a "
                        "larger capacity or run_ahead.)",
                        self.rank,
                        self._held_back_reason,
                    )
                self._changed.wait(_STOP_CHECK_INTERVAL)
        self._check()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._waiting and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    stacks = [
                        send_buffer.stack(send_buffer.count)
                        for send_buffer in self._buffers
                        if send_buffer.count > send_buffer.delivered
                    ]
                self._remove_delivered(
                    *self._service.add(self._writer, self._number, stacks, bool(self._held_back_reason))
                )
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _remove_delivered(self, number: int, why: str) -> None:
        """Forget the steps before this number, which have arrived. Keep `why` the next one is held back."""
        with self._changed:
            self._held_back_reason = why
            while self._number < number:
                send_buffer = self._buffers[0]
                count = min(number - self._number, send_buffer.count - send_buffer.delivered)
                send_buffer.delivered += count
                self._number += count
                self._waiting -= count
                self._bytes -= count * send_buffer.nbytes
                if send_buffer.delivered == send_buffer.count and len(self._buffers) > 1:
                    self._buffers.popleft()
            self._changed.notify_all()


class ServiceReplayBuffer(BaseReplayBuffer):
    """Adds to, and samples from, `ReplayService`s. Pickles as the handles to them.

    A writer belongs to the shard `rank % len(services)`. `add` returns once the step is on its way: steps are gathered
    while earlier ones travel, so an Actor that is killed may lose those of its last moments (at most 256, or 16 MiB;
    with `samples_per_insert` those of two rounds), and nobody else's death loses any but that of a service, which goes
    on from its checkpoint. Where a service holds a writer back, `add` waits, with the next step, until it no longer
    does. One thread that both adds and samples needs a service that never does: with `waits=False`, or a larger
    `capacity` or `run_ahead`.

    A batch is of one shard, each of which is drawn from in proportion to what it holds; `probabilities` are those of
    the items among all shards'.

    Args:
        agent: an Agent (anything with `replay_spec` and `step_spec`), as the services were made from.
        services: handles to them (or the objects), in order.

    Raises (every method that asks a service):
        PeerError: it did not answer for two minutes (ten in a process that is watched, as those of a program are).
        UsageError: several shards are given for a batch of one item of each environment.
    """

    def __init__(self, agent: Any, services: Sequence[Any]) -> None:
        self.spec = agent.replay_spec
        self._agent, self._handles = AgentSpecs(agent.replay_spec, agent.step_spec), list(services)
        if not self._handles:
            raise UsageError("A ServiceReplayBuffer needs at least one ReplayService.")
        if len(self._handles) > 1 and self.spec.batch_size is None:
            raise UsageError(
                f"This agent's batch is one item of each environment (batch_size=None), which only one service can "
                f"hold: use --replay-shards 1, got {len(self._handles)}."
            )
        self._lock, self._read_lock = threading.RLock(), threading.Lock()
        self._writers: Writers[StepSender] = Writers()
        self._added = threading.local()  # the outbox that each thread added to last
        self._layouts = step_layouts(agent.step_spec)
        self._claimed: dict[int, int] = {}  # rank -> its incarnation here
        self._reader, self._numbers = secrets.randbits(62), [0] * len(self._handles)
        self._chances, self._weighed_at = np.ones(len(self._handles)), -math.inf  # of the shards
        self._turns = itertools.count()
        self._rng = np.random.default_rng(self._reader)

    def __reduce__(self) -> tuple[Any, ...]:
        return ServiceReplayBuffer, (self._agent, self._handles)

    @functools.cached_property
    def _services(self) -> list[Any]:  # resolved at the first call: the process that makes a program calls nobody
        deadline = peer_timeout(_DEADLINE, watched=600.0)
        return [resolve(handle, "replay service", deadline=deadline) for handle in self._handles]

    # --- writing

    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        rank, incarnation = self._services[0].claim(secrets.randbits(62), rank)
        self._claimed[rank] = incarnation
        if num_envs is not None:
            self.open_segment(rank, num_envs)
        return rank, incarnation

    def open_segment(self, rank: int, num_envs: int) -> None:
        if num_envs < 1:
            raise UsageError(f"A writer needs at least one environment, got num_envs={num_envs}.")
        writer = WriterId(rank, self._claimed[rank], num_envs, secrets.randbits(62))
        service = self._services[rank % len(self._handles)]
        before = self._writers.by_rank.get(rank)
        if before is not None:
            with contextlib.suppress(StoppedError):
                before.settle()
            before.close()
        ahead = items_of_rounds(self.spec, num_envs, ROUNDS_AHEAD)
        with self._lock:
            service.open(writer)
            self._writers.put(StepSender(service, writer, None if ahead is None else -(-ahead // num_envs)))

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Add one step of the environments `env_ids`; see `ReplayWriter`. It may wait; see the class.

        Raises:
            StoppedError: `end_waits` was called, or the rank was claimed again, or the buffer is closed.
        """
        check_added(env_ids, step)
        if self._closed:
            raise ReplayClosedError("The replay buffer is closed.")
        sender = self._writers.find(env_ids)[0]
        if not sender.checked:
            check_step(self._layouts, step, len(env_ids))
            sender.checked = True
        if sender is not getattr(self._added, "sender", None):  # the order among the writers of one thread is kept
            self._settle()
            self._added.sender = sender
        sender.put(env_ids, step)

    def end_waits(self, rank: int) -> None:
        """See `BaseReplayBuffer`. What is on its way is still sent, until the buffer is closed."""
        if rank in self._writers.by_rank:
            self._writers.by_rank[rank].end_waits()

    def flush(self) -> None:
        """Wait until the services have every step that was added here. Raise as `add`."""
        for sender in list(self._writers.by_rank.values()):
            sender.flush()

    def _settle(self) -> None:
        """Wait until a service has the steps of this thread, or holds them back. Do not wait for other threads."""
        sender = getattr(self._added, "sender", None)
        if sender is not None:
            with contextlib.suppress(StoppedError):
                sender.settle()

    # --- reading

    def sample(self) -> Batch | None:
        """Draw a batch, or return None while there is too little, or sampling is ahead of `samples_per_insert`."""
        return self.wait_for_batch(0.0)

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Like `sample`, but waits up to `timeout` seconds for enough to be there; it may give up earlier."""
        if self._closed:
            return None
        self._settle()
        several = len(self._handles) > 1
        with self._read_lock:
            for shard in self._order():
                batch = self._services[shard].sample(self._reader, self._numbers[shard], 0.0 if several else timeout)
                if batch is None:
                    continue
                self._numbers[shard] += 1
                if several and self.spec.kind != "queue":
                    batch = batch._replace(probabilities=batch.probabilities * np.float32(self._chances[shard]))
                return batch
        if several and timeout:  # not at one of them: a batch may come to another
            time.sleep(min(timeout, _RETRY_INTERVAL))
        return None

    def _order(self) -> Iterator[int]:
        """Return the shards in the order in which to ask them for a batch."""
        count = len(self._handles)
        if count == 1:
            return iter([0])
        if self.spec.kind == "queue":
            first = next(self._turns)
            return iter([(first + i) % count for i in range(count)])
        if time.monotonic() > self._weighed_at + _WEIGHT_INTERVAL:
            self._weighed_at = time.monotonic()
            weights = np.maximum([service.weight() for service in self._services], 1e-9)  # in the end each is asked
            self._chances = weights / weights.sum()
        return iter(self._rng.choice(count, count, replace=False, p=self._chances).tolist())

    def _set_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        shards = keys[:, 0] % len(self._handles)
        for shard, service in enumerate(self._services):
            if (here := shards == shard).any():
                service.update_priorities(keys[here], priorities[here])

    def forget_before(self, version: int) -> None:
        for service in self._services:
            service.forget_before(version)

    def stats(self) -> dict[str, int]:
        """Return the sums of the counters of all services; see `ReplayReader`."""
        self._settle()
        found = [service.stats() for service in self._services]
        return {name: sum(each[name] for each in found) for name in found[0]}

    def close(self) -> None:
        """End the datasets and every call that waits. The services keep running."""
        super().close()
        for sender in self._writers.by_rank.values():
            sender.close()
