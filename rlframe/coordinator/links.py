"""How workers are called: by the operator's transport. No call waits."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

from rlframe.coordinator.messages import Failed, Reply
from rlframe.errors import UnavailableError
from rlframe.transport import Client, Future, Transport

Answer = Callable[[Reply | None, str], None]  # (the reply, or None and why there is none)


class Links:
    """Connections to workers, each by (worker_id, incarnation).

    Args:
        transport: of the workers.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._links: dict[tuple[str, int], tuple[Client, object]] = {}  # each with a mark of its own

    def open(self, worker_id: str, incarnation: int, address: str) -> None:
        """Connects to a worker."""
        self._links[worker_id, incarnation] = self._transport.connect(address), object()

    def shut(self, worker_id: str, incarnation: int) -> None:
        """Drops a connection. An answer that is still to come is nobody's."""
        self._links.pop((worker_id, incarnation), None)

    def call(self, worker_id: str, incarnation: int, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Calls a worker; `answer` is called by another thread when there is an answer, or none will come."""
        link = self._links.get((worker_id, incarnation))
        if link is None:
            answer(None, "there is no connection")
            return
        client, mark = link

        def done(future: Future) -> None:
            now = self._links.get((worker_id, incarnation))
            if now is not None and now[1] is mark:
                answer(*_outcome(future, method))

        try:
            client.submit(method, *args).add_done_callback(done)
        except Exception as error:  # the other side is gone
            answer(None, str(error))

    def close(self) -> None:
        """Drops all connections."""
        self._links.clear()


def _outcome(future: Future, method: str) -> tuple[Reply | None, str]:
    try:
        reply = future.result()
    except concurrent.futures.CancelledError:
        return None, "the call was cancelled"
    except UnavailableError as error:
        return None, str(error)
    except Exception as error:  # what a worker raises comes as a reply: this is a bug of its own
        return Failed(type(error).__name__, f"{method} raised: {error}"), ""
    if not isinstance(reply, Reply):
        return Failed("TypeError", f"{method} must give a Reply, it gave {type(reply).__name__}"), ""
    return reply, ""
