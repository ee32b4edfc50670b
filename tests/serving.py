"""Real Courier servers for tests, in this process and in child processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlframe.inferencers import Inferencer, InferencerConfig
from tests.extras import needs
from tests.fakes import FixedParams, counting_agent

needs("launchpad")

CHILD_DEADLINE = 120.0  # maximum seconds in which a process starts on a busy machine


@contextlib.contextmanager
def serving(instance: Any, address: str) -> Iterator[None]:
    """Serve the methods of `instance` with a Courier server, as a CourierNode does."""
    from launchpad.nodes.courier import courier_utils

    server = courier_utils.make_courier_server(instance, port=int(address.rpartition(":")[2]))
    server.Start()
    try:
        yield
    finally:
        server.Stop()
        server.Join()


def client(address: str) -> Any:
    """Return a Courier client, as a node gets it from Launchpad for each handle."""
    import courier

    return courier.Client(address)


@contextlib.contextmanager
def running(target: Any) -> Iterator[None]:
    """Run `target.run()` in a thread during the `with` block. At the end, stop it. Raise its error, if any."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            target.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        target.stop()
        thread.join(timeout=30)
        assert not thread.is_alive(), "run() did not end"
    if raised:
        raise raised[0]


class Child:
    """A child process that creates an object with `make(*args)`, serves it, and runs it, as a CourierNode does."""

    def __init__(self, address: str, make: Any, *args: Any) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(address, make, args))
        self._process.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def fixed_inferencer(w: float) -> Inferencer:
    """Return an inferencer whose outputs contain the parameter `w`."""
    return Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(w)}))


def _serve(address: str, make: Any, args: Any) -> None:
    instance = make(*args)
    with serving(instance, address):
        instance.run()
