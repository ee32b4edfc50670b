"""A minimal transport between threads of one process. A node has a queue of calls and a group of threads."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from rlframe.errors import NoMethodError, RemoteError, RlframeError, UnavailableError
from rlframe.transport import CALL_TIMEOUT, MappedFuture

THREADS = 4  # number of threads of each node, which is also its maximum number of concurrent calls

Answer = concurrent.futures.Future[Any]

_nodes: dict[str, Node] = {}  # address -> node
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class InProcess:
    """See `rlframe.transport.Transport`."""

    def connect(self, address: str) -> Client:
        return Client(address)

    def is_reachable(self, address: str) -> bool:
        return address in _nodes

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> Node:
        return Node(methods, address or f"node-{next(_numbers)}")

    def check(self, by: str) -> None:
        """Do nothing, because this transport has no requirements."""


class Client:
    """See `rlframe.transport.Client`."""

    def __init__(self, address: str) -> None:
        self._address = address

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return _result(self._send(method, args, kwargs))

    def submit(self, method: str, /, *args: Any) -> MappedFuture[Answer]:
        return MappedFuture(self._send(method, args, {}), _result)

    def _send(self, method: str, args: Any, kwargs: Any) -> Answer:
        message, answer = pickle.dumps((args, kwargs)), Answer()
        node = _nodes.get(self._address)
        if node is None:
            answer.set_exception(UnavailableError(f"there is no node {self._address}"))
        else:
            node.calls.put((answer, method, message))
        return answer


class Node:
    """See `rlframe.transport.Server`."""

    def __init__(self, methods: Mapping[str, Callable[..., Any]], address: str) -> None:
        self._methods, self.address = methods, address
        self.calls: queue.SimpleQueue[tuple[Answer, str, bytes] | None] = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self._run, name=f"node {address}", daemon=True).start()
        _nodes[address] = self

    def stop(self) -> None:
        if _nodes.get(self.address) is self:
            del _nodes[self.address]
        for _ in range(THREADS):
            self.calls.put(None)

    def _run(self) -> None:
        while (taken := self.calls.get()) is not None:
            answer, method, message = taken
            args, kwargs = pickle.loads(message)
            try:
                if method not in self._methods:
                    raise NoMethodError(f"{self.address} has no method {method}.")
                answer.set_result(pickle.loads(pickle.dumps(self._methods[method](*args, **kwargs))))
            except RlframeError as error:
                error.__cause__ = error.__cause__ or RemoteError(traceback.format_exc())
                answer.set_exception(error)
            except Exception:
                answer.set_exception(RemoteError(traceback.format_exc()))


def _result(answer: Answer) -> Any:
    try:
        return answer.result(CALL_TIMEOUT)
    except concurrent.futures.TimeoutError:
        raise UnavailableError(f"no answer within {CALL_TIMEOUT:g} s") from None
