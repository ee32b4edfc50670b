"""Collect groups of sequences concurrently: start, pause, retry and cancel attempts.

The functions `process` and `evaluate` run an environment with a model, but without a trainer or a trajectory service.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from rlframe import retry
from rlframe.errors import EnvError, PeerError, RemoteError, UnavailableError, UsageError
from rlframe.language.environments.files import write_page
from rlframe.language.environments.metrics import CollectStatistics, open_wandb

if TYPE_CHECKING:
    from rlframe.language.environments.env import BaseEnv

ATTEMPTS = 3  # maximum number of attempts for one item
FAILURES_IN_A_ROW = 32  # collecting ends after this number of failed attempts in a row
MAX_ITEMS_WITHOUT_GROUP = 100  # after this number of items in a row without a group, warn or raise an error
NO_GROUP_REASON = (
    "collect_trajectories or postprocess_histories returned None, or the log gives the reason why groups were not sent."
)
# Seconds to wait after a failure. Each further failure in a row doubles them.
_pauses = functools.partial(retry.backoff, 0.1, 1.0, jitter=0.5)

logger = logging.getLogger(__name__)

# Errors which mean that the service or a model server did not answer before its deadline.
_UNREACHABLE = (PeerError, RemoteError, UnavailableError)

T = TypeVar("T")


class Gate:
    """A gate that pauses all attempts to collect groups.

    While the gate is closed, an attempt stops before its next request to a model. It sends this request when the gate
    opens.
    """

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._paused_at = self._paused_seconds = 0.0  # start of the current pause; total duration of earlier pauses

    @property
    def closed(self) -> bool:
        return not self._opened.is_set()

    @property
    def clock(self) -> float:
        """Time in seconds of a clock that stops while the gate is closed."""
        return (self._paused_at if self.closed else time.monotonic()) - self._paused_seconds

    def set(self, closed: bool) -> None:
        if closed and not self.closed:
            self._paused_at = time.monotonic()
            self._opened.clear()
        elif not closed and self.closed:
            self._paused_seconds += time.monotonic() - self._paused_at
            self._opened.set()

    async def wait_open(self) -> None:
        """Wait until the gate is open."""
        await self._opened.wait()


@dataclasses.dataclass(eq=False)
class CollectAttempt:
    """One attempt to collect a group for an item."""

    item: Any
    gate: Gate
    attempt: int = 1
    policy_version: int | None = None  # oldest version of the parameters among the model's answers
    newest_version: int | None = None  # newest version of the parameters among the model's answers
    task: asyncio.Task[Any] | None = None

    def __post_init__(self) -> None:
        self._started = self.gate.clock

    @property
    def seconds(self) -> float:
        """Seconds since the attempt started, without pauses."""
        return self.gate.clock - self._started

    def record_version(self, policy_version: int | None) -> None:
        """Record that this attempt got an answer from this version of the parameters."""
        if policy_version is not None:
            known = self.policy_version
            self.policy_version = policy_version if known is None else min(known, policy_version)
            self.newest_version = max(policy_version, self.newest_version or policy_version)


# The attempt that the current task belongs to. Tasks that this task starts inherit the value. The value is None in
# evaluations, so evaluations ignore the gate.
current_attempt: contextvars.ContextVar[CollectAttempt | None] = contextvars.ContextVar("rlframe_attempt", default=None)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results.

    If a coroutine raises an error, cancel the other coroutines, wait until they have ended, and raise this error.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Collector:
    """Runs many attempts concurrently, each in its own task.

    While the gate is closed, each running attempt waits before its next request to a model. It continues there when the
    gate opens. If an attempt raises an error, its item is tried again, up to `ATTEMPTS` times in total.

    Args:
        next_item: Returns an item, or None if there is no item now.
        handle: Collects a group for an item and sends the group. Returns True if there was a group.
        statistics: Records the duration of attempts.
        timeout: Seconds for one attempt, without pauses. 0 or less means no limit.

    Attributes:
        gate: Pauses the attempts.
        under_way: Running attempts.
        items_without_group: Number of the latest items in a row that gave no group.
    """

    def __init__(
        self,
        next_item: Callable[[], Awaitable[Any]],
        handle: Callable[[Any], Awaitable[bool]],
        statistics: CollectStatistics,
        timeout: float,
    ) -> None:
        self.gate = Gate()
        self.under_way: set[CollectAttempt] = set()
        self.failed: BaseException | None = None  # the error that ends collecting; None if there is none
        self._next_item, self._handle = next_item, handle
        self._statistics = statistics
        self._timeout = timeout
        self._retries: list[CollectAttempt] = []
        self._failures, self._pauses = 0, _pauses()  # consecutive failures
        self.items_without_group = 0
        self._changed = asyncio.Event()

    async def fill(self, limit: int) -> bool:
        """Start attempts until `limit` attempts run. Return False if the items did not suffice."""
        while len(self.under_way) < limit:
            if self._retries:
                earlier = self._retries.pop()
                self._start(CollectAttempt(earlier.item, self.gate, earlier.attempt + 1))
            elif (item := await self._next_item()) is not None:
                self._start(CollectAttempt(item, self.gate))
            else:
                return False
        return True

    async def wait(self, seconds: float) -> None:
        """Wait until an attempt ends, for at most `seconds`. Then cancel the attempts that exceed the timeout.

        Raises:
            RlframeError: The service or a model did not answer before its deadline.
            EnvError: `FAILURES_IN_A_ROW` attempts in a row failed.
        """
        # Do not use `asyncio.wait_for`, because in Python 3.10 it can swallow a cancellation.
        timer = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()
        self._changed.clear()
        for late in [one for one in self.under_way if 0 < self._timeout < one.seconds]:
            logger.warning(
                "Attempt cancelled after %g s (worker_timeout) for the item %.200r", self._timeout, late.item
            )
            self._statistics.record(late.seconds, sent=False)
            self._drop(late)
        if self.failed is not None:
            raise self.failed

    async def stop(self) -> None:
        """Cancel all running attempts."""
        tasks = [one.task for one in self.under_way if one.task is not None]
        for one in list(self.under_way):
            self._drop(one)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, one: CollectAttempt) -> None:
        self.under_way.add(one)
        one.task = asyncio.create_task(self._run(one))

    def _drop(self, one: CollectAttempt) -> None:
        self.under_way.discard(one)
        if one.task is not None:
            one.task.cancel()

    async def _run(self, one: CollectAttempt) -> None:
        current_attempt.set(one)
        try:
            sent = await self._handle(one.item)
        except Exception as error:
            self._statistics.record(one.seconds, sent=False)
            if isinstance(error, _UNREACHABLE):
                self.failed = self.failed or error
            else:
                await self._failure(one, error)
        else:
            self._failures, self._pauses = 0, _pauses()
            self._statistics.record(one.seconds, sent=sent)
            self.items_without_group = 0 if sent else self.items_without_group + 1
            if self.items_without_group and self.items_without_group % MAX_ITEMS_WITHOUT_GROUP == 0:
                logger.warning("%d items in a row gave no group: %s", self.items_without_group, NO_GROUP_REASON)
        finally:
            self.under_way.discard(one)
            self._changed.set()

    async def _failure(self, one: CollectAttempt, error: Exception) -> None:
        self._failures += 1
        logger.error("Collecting failed (attempt %d of %d): %.200r", one.attempt, ATTEMPTS, one.item, exc_info=error)
        if self._failures >= FAILURES_IN_A_ROW:
            self.failed = EnvError(
                f"Collecting failed {self._failures} times in a row, at last with {type(error).__name__}: {error}"
            )
            self.failed.__cause__ = error
            return
        await asyncio.sleep(next(self._pauses))
        if one.attempt < ATTEMPTS:
            self._retries.append(one)


_POLL_INTERVAL = 1.0  # seconds between two checks for attempts that exceed the timeout


async def process(env: BaseEnv) -> tuple[pathlib.Path, pathlib.Path]:
    """Collect `total_steps` groups. Write them to the file `data_path_to_save_groups` and to an HTML page next to it.

    Returns:
        (path of the JSONL file, path of the HTML page).

    Raises:
        EnvError: There were not enough items, collecting failed too often, or `MAX_ITEMS_WITHOUT_GROUP` items in a row
            gave no group. The groups that were collected before the error are written.
    """
    config = env.config
    if env.groups_file is None:
        raise UsageError("process needs a file to write groups to. Give --env.data_path_to_save_groups FILE.jsonl.")
    if config.total_steps < 1:
        raise UsageError(
            f"process collects total_steps groups, so it must be at least 1; got {config.total_steps}. "
            "Give --env.total_steps."
        )
    env.process_mode = True
    env.tracker = open_wandb(config, config.wandb_name or env.name or type(env).__name__, None, None)

    async def handle(item: Any) -> bool:
        kept = await env.handle_env(item)
        if kept:
            env.curr_step += 1
            await env.wandb_log({})
            logger.info("%d of %d groups", env.curr_step, config.total_steps)
        return kept

    collector = Collector(env.next_item, handle, env.statistics, config.worker_timeout)
    env.collector, env.workers = collector, collector.under_way
    try:
        await env.setup()
        env.curr_step = 0  # counts groups
        while (left := config.total_steps - env.curr_step) > 0:
            more = await collector.fill(min(env.max_num_workers, left))
            if not more and not collector.under_way:
                raise EnvError(f"There are no more items after {env.curr_step} of {config.total_steps} groups.")
            await collector.wait(_POLL_INTERVAL)
            if collector.items_without_group >= MAX_ITEMS_WITHOUT_GROUP:
                so_far = f"after {env.curr_step} of {config.total_steps}"
                raise EnvError(f"{MAX_ITEMS_WITHOUT_GROUP} items in a row gave no group, {so_far}: {NO_GROUP_REASON}")
    finally:
        await collector.stop()
        await env.close()
        page = write_page(env.groups_file.path) if env.groups_file.path.exists() else None
    assert page is not None
    return env.groups_file.path, page


async def evaluate(env: BaseEnv) -> None:
    """Run one evaluation."""
    config = env.config
    env.tracker = open_wandb(config, config.wandb_name or env.name or type(env).__name__, None, None)
    try:
        await env.setup()
        await env.evaluate()
        await env.wandb_log({})
    finally:
        await env.close()
