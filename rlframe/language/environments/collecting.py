"""Groups that are collected side by side: started, paused, repeated, given up.

`process` and `evaluate` run an environment and a model without a trainer and a trajectory service.
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

ATTEMPTS = 3  # for one item
FAILURES_IN_A_ROW = 32  # of attempts, after which the environment or its model is broken
MAX_ITEMS_WITHOUT_GROUP = 100  # items in a row without a group, of which one should hear
WHY = "collect_trajectories or postprocess_histories gave None, or what they gave was not sent, as logged."
# Seconds before an item's next attempt, doubled with each failure in a row.
_pauses = functools.partial(retry.backoff, 0.1, 1.0, jitter=0.5)

logger = logging.getLogger(__name__)

_AWAY = (PeerError, RemoteError, UnavailableError)  # the service or a model, at the end of its deadline

T = TypeVar("T")
NextItem = Callable[[], Awaitable[Any]]
HandleItem = Callable[[Any], Awaitable[bool]]


class Gate:
    """Open or closed. What runs behind a closed one goes on until it asks a model, and waits there."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._stood_at = self._stood = 0.0  # since when, and for how long, its clock stands

    @property
    def closed(self) -> bool:
        return not self._opened.is_set()

    @property
    def clock(self) -> float:
        """Seconds on a clock that stands still while it is closed."""
        return (self._stood_at if self.closed else time.monotonic()) - self._stood

    def set(self, closed: bool) -> None:
        if closed and not self.closed:
            self._stood_at = time.monotonic()
            self._opened.clear()
        elif not closed and self.closed:
            self._stood += time.monotonic() - self._stood_at
            self._opened.set()

    async def passed(self) -> None:
        """Return while it is open."""
        await self._opened.wait()


@dataclasses.dataclass(eq=False)
class CollectAttempt:
    """One attempt to collect a group for an item."""

    item: Any
    gate: Gate
    attempt: int = 1
    policy_version: int | None = None  # the oldest that answered
    newest_version: int | None = None
    task: asyncio.Task[Any] | None = None

    def __post_init__(self) -> None:
        self._started = self.gate.clock

    @property
    def seconds(self) -> float:
        """Since it started, without pauses."""
        return self.gate.clock - self._started

    def answered(self, policy_version: int | None) -> None:
        """A model answered for it, with this version of its parameters."""
        if policy_version is not None:
            known = self.policy_version
            self.policy_version = policy_version if known is None else min(known, policy_version)
            self.newest_version = max(policy_version, self.newest_version or policy_version)


# Set in the task that collects a group, and so in every task that this one starts. Nowhere else: an evaluation has
# none, and passes closed gates.
current_attempt: contextvars.ContextVar[CollectAttempt | None] = contextvars.ContextVar("rlframe_attempt", default=None)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, side by side. Where one raises, the others end first: nothing goes on unseen."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Collector:
    """Handle so many items at once, each in a task of its own.

    While its gate is closed, what is under way keeps what it has: it waits at its next question to a model, and goes
    on from there. An item whose handling raises is tried again, `ATTEMPTS` times in all.

    Args:
        next_item: gives an item, or None where there is none now.
        handle: collects a group for an item and sends it; says whether there was one.
        timeout: seconds for one attempt, not counting pauses; 0 or less: none.

    Attributes:
        fruitless: items in a row that were handled and gave no group.
    """

    def __init__(self, next_item: NextItem, handle: HandleItem, statistics: CollectStatistics, timeout: float) -> None:
        self.gate = Gate()
        self.under_way: set[CollectAttempt] = set()
        self.failed: BaseException | None = None  # what the environment cannot go on from
        self._next_item, self._handle = next_item, handle
        self._statistics = statistics
        self._timeout = timeout
        self._again: list[CollectAttempt] = []
        self._failures, self._pauses = 0, _pauses()  # in a row
        self.fruitless = 0
        self._changed = asyncio.Event()

    async def fill(self, limit: int) -> bool:
        """Start items until so many are under way. Return whether there were items enough."""
        while len(self.under_way) < limit:
            if self._again:
                earlier = self._again.pop()
                self._start(CollectAttempt(earlier.item, self.gate, earlier.attempt + 1))
            elif (item := await self._next_item()) is not None:
                self._start(CollectAttempt(item, self.gate))
            else:
                return False
        return True

    async def wait(self, seconds: float) -> None:
        """Return when something ended, or after so many seconds.

        Raises:
            RlframeError: the service or a model stayed away beyond its deadline.
            EnvError: `FAILURES_IN_A_ROW` attempts failed.
        """
        # Not `wait_for`, which in Python 3.10 may take a cancellation for the end of what it waits for.
        timer = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()
        self._changed.clear()
        for late in [one for one in self.under_way if 0 < self._timeout < one.seconds]:
            logger.warning("An item is given up after %g s (worker_timeout): %.200r", self._timeout, late.item)
            self._statistics.ended(late.seconds, sent=False)
            self._drop(late)
        if self.failed is not None:
            raise self.failed

    async def stop(self) -> None:
        """End what is under way."""
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
            self._statistics.ended(one.seconds, sent=False)
            if isinstance(error, _AWAY):
                self.failed = self.failed or error
            else:
                await self._failure(one, error)
        else:
            self._failures, self._pauses = 0, _pauses()
            self._statistics.ended(one.seconds, sent=sent)
            self.fruitless = 0 if sent else self.fruitless + 1
            if self.fruitless and self.fruitless % MAX_ITEMS_WITHOUT_GROUP == 0:
                logger.warning("%d items in a row gave no group: %s", self.fruitless, WHY)
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
            self._again.append(one)


_LOOK = 1.0  # seconds after which late items are looked for


async def process(env: BaseEnv) -> tuple[pathlib.Path, pathlib.Path]:
    """Collect `total_steps` groups and write them to `data_path_to_save_groups`, and as a page beside it.

    Returns:
        The JSONL file and the HTML file.

    Raises:
        EnvError: there were no more items, collecting failed too often, or `MAX_ITEMS_WITHOUT_GROUP` items in a row gave no group.
            What was collected is written.
    """
    config = env.config
    if env.groups_file is None:
        raise UsageError("process writes groups: give --env.data_path_to_save_groups FILE.jsonl.")
    if config.total_steps < 1:
        raise UsageError(
            f"process collects total_steps groups, 1 or more; got {config.total_steps}. Give --env.total_steps."
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
        env.curr_step = 0  # groups so far
        while (left := config.total_steps - env.curr_step) > 0:
            more = await collector.fill(min(env.max_num_workers, left))
            if not more and not collector.under_way:
                raise EnvError(f"There are no more items after {env.curr_step} of {config.total_steps} groups.")
            await collector.wait(_LOOK)
            if collector.fruitless >= MAX_ITEMS_WITHOUT_GROUP:
                so_far = f"after {env.curr_step} of {config.total_steps}"
                raise EnvError(f"{MAX_ITEMS_WITHOUT_GROUP} items in a row gave no group, {so_far}: {WHY}")
    finally:
        await collector.stop()
        await env.close()
        page = write_page(env.groups_file.path) if env.groups_file.path.exists() else None
    assert page is not None
    return env.groups_file.path, page


async def evaluate(env: BaseEnv) -> None:
    """One evaluation."""
    config = env.config
    env.tracker = open_wandb(config, config.wandb_name or env.name or type(env).__name__, None, None)
    try:
        await env.setup()
        await env.evaluate()
        await env.wandb_log({})
    finally:
        await env.close()
