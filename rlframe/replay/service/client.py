"""The client of the replay services in one process. It collects new steps while earlier steps are sent."""

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
from rlframe.interprocess.heartbeat import peer_timeout, waiting_for
from rlframe.replay.base import BaseReplayBuffer, ReplayClosedError
from rlframe.replay.layout import check_added, check_step, step_layouts
from rlframe.replay.rate_limiter import ROUNDS_AHEAD, items_of_rounds
from rlframe.replay.service.server import SendBuffer, WriterId
from rlframe.replay.steps import Writers
from rlframe.types import AgentSpecs, Batch, Step, global_env_ids

_MAX_STEPS, _MAX_BYTES = 256, 16 * 2**20  # maximum steps (and their bytes) that are collected and sent together
_WARN_AFTER = 60.0  # seconds before a waiting writer logs a warning; a learner can compile for a long time
_STOP_CHECK_INTERVAL = 0.2  # seconds between two checks whether the writer was stopped
_DEADLINE = 120.0  # seconds to wait for a service that does not answer
_RETRY_INTERVAL = 0.01  # seconds before all shards are asked again, if no shard has a batch
_WEIGHT_INTERVAL = 0.2  # seconds between two updates of the shards' weights

_log = logging.getLogger(__name__)


class StepSender:
    """Sends the steps of one writer in order. A thread sends one message at a time.

    Args:
        service: a `ReplayService`, or a client of a `ReplayService`.
        writer: the writer of the steps.
        max_steps: maximum number of undelivered steps. None means 256.

    Attributes:
        rank, num_envs, id_bytes: see `Writer`.
        checked: True after the shapes and dtypes of the first step were checked.
    """

    def __init__(self, service: Any, writer: WriterId, max_steps: int | None = None) -> None:
        self._service, self._writer = service, writer
        self.rank, self.num_envs = writer.rank, writer.num_envs
        self.id_bytes = global_env_ids(writer.rank, np.arange(writer.num_envs)).tobytes()
        self._step_limit = _MAX_STEPS if max_steps is None else min(max_steps, _MAX_STEPS)
        self.checked = False
        self._changed = threading.Condition()
        self._buffers: collections.deque[SendBuffer] = collections.deque()  # steps that are not delivered yet
        self._waiting = self._bytes = 0  # number and size of the undelivered steps
        self._number = 0  # number of the first undelivered step
        self._held_back_reason = ""  # the reason why the service makes the writer wait
        self._error: BaseException | None = None
        self._is_stopped = self._closed = False
        threading.Thread(target=self._run, name="rlframe replay sender", daemon=True).start()

    def put(self, env_ids: np.ndarray, step: Step) -> None:
        """Add a step.

        Wait while there are too many undelivered steps, or while the service makes the writer wait. Raise the error of
        an earlier step that could not be sent.
        """
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
        """Wait until all steps are delivered."""
        self._wait(lambda: not self._waiting)

    def settle(self) -> None:
        """Wait until all steps are delivered, or until the service makes the writer wait."""
        self._wait(lambda: not self._waiting or bool(self._held_back_reason))

    def end_waits(self) -> None:
        """From now on, calls of `put` raise StoppedError if they must wait."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread that sends steps."""
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
        """Wait until `is_over` returns True. The lock is held when `is_over` is called. Raise the errors of `put`."""
        with self._changed:
            if not is_over():
                self._sleep_until(is_over)
            self._check()

    def _sleep_until(self, is_over: Callable[[], bool]) -> None:
        """Sleep until `is_over` returns True. If the service makes the writer wait for a long time, warn once."""
        began, warned = time.monotonic(), False
        with waiting_for("the replay service"):
            while not is_over():
                self._check()
                if self._is_stopped:
                    raise StoppedError(f"Writer {self._writer.rank} was stopped while the replay service made it wait.")
                if not warned and self._held_back_reason and time.monotonic() > began + _WARN_AFTER:
                    warned = True
                    _log.warning(
                        "The replay service makes writer %d wait: %s. (A thread that both adds and samples needs a "
                        "larger capacity or run_ahead.)",
                        self.rank,
                        self._held_back_reason,
                    )
                self._changed.wait(_STOP_CHECK_INTERVAL)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed)
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
        """Remove the delivered steps. Their numbers are below `number`.

        `why` is the reason why the next step must wait, or "" if it does not have to wait.
        """
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
    """Adds steps to one or more `ReplayService`s, and samples from these services.

    A pickled buffer contains the specs, and handles to the services.

    Each service is a shard of the replay. A writer adds to the shard `rank % len(services)`. `add` returns before the
    step is delivered, and steps are collected while earlier steps are sent. So a killed Actor can lose its last steps:
    at most 256 steps or 16 MiB. (With `samples_per_insert`, at most two rounds; see rate_limiter.py.) A service that
    dies loses the steps since its checkpoint. If other processes die, no steps are lost.

    If a service makes a writer wait, the next `add` waits. If a single thread both adds and samples, the service must
    never make it wait: set `waits=False`, or a larger `capacity` or `run_ahead`.

    All items of a batch are from one shard. In a queue, the batches come from each shard in turn. In other replays, a
    random shard is chosen, in proportion to its weight. `probabilities` refer to the items of all shards.

    Args:
        agent: the Agent of the services, or any object with the same `replay_spec` and `step_spec`.
        services: the services, or handles to them. The order must be the same in all processes.

    Raises (every method that calls a service):
        PeerError: the service did not answer for two minutes, or for ten minutes in a process whose heartbeats are
            watched, such as a node of a program.
        UsageError: there are several shards, but a batch has one item of each environment.
    """

    def __init__(self, agent: Any, services: Sequence[Any]) -> None:
        self.spec = agent.replay_spec
        self._agent, self._handles = AgentSpecs(agent.replay_spec, agent.step_spec), list(services)
        if not self._handles:
            raise UsageError("A ServiceReplayBuffer needs at least one ReplayService.")
        if len(self._handles) > 1 and self.spec.batch_size is None:
            raise UsageError(
                f"This agent's batch has one item of each environment (batch_size=None), so all items must be in one "
                f"service: use --replay-shards 1, got {len(self._handles)}."
            )
        self._lock, self._read_lock = threading.RLock(), threading.Lock()
        self._writers: Writers[StepSender] = Writers()
        self._added = threading.local()  # the last sender that this thread used
        self._layouts = step_layouts(agent.step_spec)
        self._claimed: dict[int, int] = {}  # rank -> incarnation in this process
        self._reader, self._numbers = secrets.randbits(62), [0] * len(self._handles)
        self._chances, self._weighed_at = np.ones(len(self._handles)), -math.inf  # probabilities of the shards
        self._turns = itertools.count()
        self._rng = np.random.default_rng(self._reader)

    def __reduce__(self) -> tuple[Any, ...]:
        return ServiceReplayBuffer, (self._agent, self._handles)

    @functools.cached_property
    # Resolve the handles only at the first call, because the process that creates a program cannot call its nodes.
    def _services(self) -> list[Any]:
        deadline = peer_timeout(_DEADLINE, watched=600.0)
        return [resolve(handle, "replay service", deadline=deadline) for handle in self._handles]

    # --- writing

    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        shard = (rank or 0) % len(self._services)  # the shard of a known rank knows the rank's earlier claims
        rank, incarnation = self._services[shard].claim(secrets.randbits(62), rank)
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
        """Add one step of the environments `env_ids`. See `ReplayWriter`. Wait if the service makes the writer wait.

        Raises:
            StoppedError: `end_waits` was called, the rank was claimed again, or the buffer is closed.
        """
        check_added(env_ids, step)
        if self._closed:
            raise ReplayClosedError("The replay buffer is closed.")
        sender = self._writers.find(env_ids)[0]
        if not sender.checked:
            check_step(self._layouts, step, len(env_ids))
            sender.checked = True
        if sender is not getattr(self._added, "sender", None):  # keep the steps of this thread in order
            self._settle()
            self._added.sender = sender
        sender.put(env_ids, step)

    def end_waits(self, rank: int) -> None:
        """See `BaseReplayBuffer`. Collected steps are sent until the buffer is closed."""
        if rank in self._writers.by_rank:
            self._writers.by_rank[rank].end_waits()

    def flush(self) -> None:
        """Wait until all steps that this process has added are delivered. Raise the errors of `add`."""
        for sender in list(self._writers.by_rank.values()):
            sender.flush()

    def _settle(self) -> None:
        """Wait until the steps of this thread are delivered, or until the service makes this thread's writer wait."""
        sender = getattr(self._added, "sender", None)
        if sender is not None:
            with contextlib.suppress(StoppedError):
                sender.settle()

    # --- reading

    def sample(self) -> Batch | None:
        """Draw a batch. Return None if there are too few items, or if sampling is ahead of `samples_per_insert`."""
        return self.wait_for_batch(0.0)

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Wait up to `timeout` seconds until there are enough items, and draw a batch.

        The method can return None before the timeout.
        """
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
        if several and timeout:  # do not wait for one shard, because another shard can have a batch earlier
            time.sleep(min(timeout, _RETRY_INTERVAL))
        return None

    def _order(self) -> Iterator[int]:
        """Return the indices of the shards, in the order in which they are asked for a batch."""
        count = len(self._handles)
        if count == 1:
            return iter([0])
        if self.spec.kind == "queue":
            first = next(self._turns)
            return iter([(first + i) % count for i in range(count)])
        if time.monotonic() > self._weighed_at + _WEIGHT_INTERVAL:
            self._weighed_at = time.monotonic()
            # A weight must be above 0, so that all shards are asked.
            weights = np.maximum([service.weight() for service in self._services], 1e-9)
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
        """Return the counters of `ReplayReader.stats`. They are sums over all services."""
        self._settle()
        found = [service.stats() for service in self._services]
        return {name: sum(each[name] for each in found) for name in found[0]}

    def close(self) -> None:
        """End the datasets and all waiting calls. The services keep running."""
        super().close()
        for sender in self._writers.by_rank.values():
            sender.close()
