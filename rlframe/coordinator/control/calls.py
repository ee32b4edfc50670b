"""Calls of a coordinator that may be slow, or away: each in a thread of its own, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

from rlframe.errors import PeerError, RlframeError, UnavailableError

STATUS_AGE = 0.2  # seconds for which a status is good enough for whoever asks
STATUS_DEADLINE = 3.0  # seconds for one
DEADLINE = 10.0  # seconds for any other call
AT_ONCE = 32  # calls that are under way


class Calls:
    """The methods of a coordinator, for an event loop.

    Args:
        target: has the coordinator's methods; they may block. One that never returns costs a thread, which ends with
            the process.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._under_way = 0
        self._status: asyncio.Task[dict[str, Any]] | None = None
        self._status_at = 0.0

    async def __call__(self, method: str, *args: Any, deadline: float = DEADLINE) -> Any:
        """What `target.method(*args)` returns, or raises.

        Raises:
            PeerError: it did neither within `deadline` seconds. It may yet.
            UnavailableError: too many calls are under way; this one was not made.
        """
        if self._under_way >= AT_ONCE:
            raise UnavailableError(
                f"{self._under_way} calls wait for the coordinator already: it is slow, or away. Ask again."
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._under_way += 1

        def call() -> None:
            outcome: Any = None
            error: BaseException | None = None
            try:
                outcome = getattr(self._target, method)(*args)
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._done, future, outcome, error)

        threading.Thread(target=call, name=f"control {method}", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(future), deadline)
        except asyncio.TimeoutError:
            raise PeerError(
                f"The coordinator did not answer {method}() within {deadline:g} s: it may be restarting, or hang. "
                "Ask again."
            ) from None
        except RlframeError:
            raise
        except Exception as error:
            raise UnavailableError(f"The coordinator failed in {method}(): {type(error).__name__}: {error}") from error

    async def status(self) -> dict[str, Any]:
        """The coordinator's status, at most `STATUS_AGE` seconds old. However many ask, it is asked once."""
        task = self._status
        if task is None or (task.done() and time.monotonic() - self._status_at > STATUS_AGE):
            task = self._status = asyncio.create_task(self._ask_status())
        return await asyncio.shield(task)

    def forget_status(self) -> None:
        """Has the next one who asks see what was just changed."""
        self._status = None

    async def _ask_status(self) -> dict[str, Any]:
        try:
            return await self("status", deadline=STATUS_DEADLINE)
        finally:
            self._status_at = time.monotonic()

    def _done(self, future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
        self._under_way -= 1
        if future.cancelled():
            return
        if error is None:
            future.set_result(outcome)
        else:
            future.set_exception(error)
            future.exception()  # it was looked at: nobody may wait for it any more
