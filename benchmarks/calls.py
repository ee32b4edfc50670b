"""Calls from one process to another: rlframe's transports and the standard library's connections.

The other process is `python -m benchmarks.calls WAY`. It runs until its standard input is closed.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dm_env import TimeStep

from benchmarks.context import Context
from benchmarks.report import Row, Table
from rlframe import extras
from rlframe.transport import DEFAULT
from rlframe.transport.sockets import SocketTransport

SOCKETS = "Unix sockets"
WAYS = {"sockets": SOCKETS, "courier": "Courier", "connection": "multiprocessing.connection"}
AT_LEAST = {"courier": 1.0}  # minimum ratio to Courier's speed, in every row
_ROOT = Path(__file__).parents[1]
_ROWS = 64

_PARAMS = np.zeros(1 << 20, np.float32)  # 4 MiB
_ANSWER = np.zeros(_ROWS, np.int32), {"logits": np.zeros((_ROWS, 2), np.float32)}, 7
_TIMESTEP = TimeStep(
    np.ones(_ROWS, np.int32), np.zeros(_ROWS, np.float32), np.ones(_ROWS, np.float32), np.zeros((_ROWS, 4), np.float32)
)
METHODS: dict[str, Callable[..., Any]] = {
    "ping": lambda: None,
    "inference": lambda env_ids, timestep, state: _ANSWER,
    "get_params": lambda: _PARAMS,
}
# title -> (method, arguments, number of calls in a turn)
CALLS: dict[str, tuple[str, tuple[Any, ...], int]] = {
    "A call without arguments": ("ping", (), 1_000),
    f"A request of {_ROWS} CartPole rows, in arrays": ("inference", (np.arange(_ROWS), _TIMESTEP, ()), 500),
    "An answer of 4 MiB": ("get_params", (), 40),
}


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    ways = [way for way in WAYS if way != "courier" or extras.is_installed("launchpad")]
    taken: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as opened:
        call = {way: opened.enter_context(_client(way)) for way in ways}
        for turn in range(context.repeats):
            log(f"calls: turn {turn + 1} of {context.repeats}")
            for title, (method, args, count) in CALLS.items():
                for way in ways:
                    seconds = _per_call(call[way], method, args, context.steps(count, count // 10))
                    taken.setdefault((title, way), []).append(1e6 * seconds)

    def row(title: str, way: str) -> Row:
        return Row(WAYS[way], statistics.median(taken[title, way]), AT_LEAST.get(way))

    return [
        Table(title, "us", row(title, ways[0]), tuple(row(title, way) for way in ways[1:]), higher_is_better=False)
        for title in CALLS
    ]


def _per_call(call: Callable[..., Any], method: str, args: tuple[Any, ...], count: int) -> float:
    for _ in range(5):
        call(method, *args)
    began = time.perf_counter()
    for _ in range(count):
        call(method, *args)
    return (time.perf_counter() - began) / count


@contextlib.contextmanager
def _client(way: str) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls a method of another process."""
    command = [sys.executable, "-m", "benchmarks.calls", way]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        address = server.stdout.readline().strip()
        if way != "connection":
            yield (SocketTransport() if way == "sockets" else DEFAULT).connect(address).call
        else:
            with multiprocessing.connection.Client(address) as connection:

                def call(*request: Any) -> Any:
                    connection.send(request)
                    return connection.recv()

                yield call
        server.stdin.close()


def serve(way: str) -> None:
    """Serve `METHODS` until standard input is closed."""
    if way == "connection":
        with multiprocessing.connection.Listener(family="AF_UNIX") as listener:
            print(listener.address, flush=True)
            with listener.accept() as connection, contextlib.suppress(EOFError):
                while True:
                    method, *args = connection.recv()
                    connection.send(METHODS[method](*args))
        return
    server = (SocketTransport() if way == "sockets" else DEFAULT).serve(METHODS)
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    serve(sys.argv[1])
