"""A program with small nodes, for tests of engines. Run it: `python small_program.py BEHAVIOR ENGINE [RAY_ADDRESS]`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from rlframe.engines.base import EngineOptions
from rlframe.errors import RlframeError, UnavailableError, UsageError
from rlframe.handles import resolve
from rlframe.interprocess.memory import MACHINE
from rlframe.params.publication import LocalParams
from rlframe.programs.options import registry
from rlframe.shutdown import program_stop_event, stop_program

REPORTS = 4
VERSIONS = 5


class Server:
    """A counter node without a method `run`. Its engine serves the node's methods until the program ends."""

    def __init__(self) -> None:
        self._versions: Any = LocalParams()
        self._count, self._reports, self._refused = 0, 0, False
        print(f"server {os.getpid()} on {os.environ['JAX_PLATFORMS']}")

    def add(self) -> int:
        if not self._refused:  # the first call fails, because callers must retry until a node is ready
            self._refused = True
            raise UnavailableError("not yet")
        self._count += 1
        return self._count

    def note_report(self) -> None:
        self._reports += 1

    def reports(self) -> int:
        return self._reports

    def pid(self) -> int:
        return os.getpid()

    def publish(self, version: int) -> None:
        # Publish an array instead of `PackedParams`.
        self._versions.publish(version, np.full(500_000, version))

    def get_packed(self, known_version: int = -1) -> Any:
        print(f"gives version {self._versions.version}")
        return self._versions.get_packed(known_version)

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        return self._versions.wait_for_version(known_version, timeout)

    def place(self) -> str | None:
        return os.environ.get(MACHINE)

    def double(self, array: np.ndarray) -> np.ndarray:
        return 2 * array

    def refuse(self) -> None:
        raise UsageError("not so")


class Client:
    """Calls the server, and then behaves as the test requires."""

    def __init__(self, server: Any, behavior: str) -> None:
        self._server, self._behavior = resolve(server, "server"), behavior

    def run(self) -> None:
        count = self._server.add()
        print(f"client {os.getpid()} counts {count}")
        if self._behavior == "report":
            where = "beside" if self._server.place() == os.environ[MACHINE] else "elsewhere"
            doubled = self._server.double(np.ones((300, 1000)))
            doubled += 1  # this line raises if the returned array is read-only
            try:
                self._server.refuse()
            except UsageError as error:
                print(f"from {where}: {doubled.mean()}, {error}")
            self._server.note_report()
        if self._behavior == "act" and self._server.place() != os.environ[MACHINE]:
            version = -1
            while version < VERSIONS:
                version = self._server.wait_for_version(version, 1.0)
                held, array = self._server.get_packed(-1)
                assert held >= version and (array == held).all()
                assert self._server.get_packed(held) == (held, None)
            print("has the last version")
        if self._behavior == "act":
            self._server.note_report()
        if self._behavior == "publish":
            for version in range(VERSIONS + 1):
                self._server.publish(version)
                time.sleep(0.3)
        if self._behavior in ("gather", "publish"):
            while self._server.reports() < REPORTS:
                time.sleep(0.05)
        if self._behavior == "raise":
            raise ValueError("the client is unhappy")
        if self._behavior == "stop":
            stop_program()
        if self._behavior in ("stop", "wait"):
            stop = program_stop_event()
            assert stop is not None
            while not stop.wait(0.1):
                pass
            print("client stops")
        if self._behavior == "kill server":
            killed = self._server.pid()
            os.kill(killed, 9)
            while self._server.pid() == killed:
                pass
            print(f"the count of the restarted server is {self._server.add()}")


def main(behavior: str, name: str, ray_address: str | None = None) -> None:
    engine = registry.engine_class(name)(EngineOptions(max_restarts=int(behavior != "raise"), ray_address=ray_address))
    server = engine.add("server", Server)
    engine.add("monitor", Client, server, behavior)
    if behavior == "wait":
        engine.add("actor", Client, server, behavior)
    if behavior in ("gather", "publish"):
        for _ in range(REPORTS):
            engine.add("actor", Client, server, "report" if behavior == "gather" else "act")
    try:
        print("ran:", engine.run())
    except RlframeError as error:
        print("failed:", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    # Import this module by its name, because nodes must not look for their classes in __main__.
    from tests.engines.small_program import main as imported

    imported(*sys.argv[1:])
