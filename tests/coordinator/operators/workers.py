"""Workers that only reply to pings, for tests of the start and the end of processes. Worker processes import them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading

from rlframe.coordinator.messages import Alive
from rlframe.errors import UsageError


class TinyWorker:
    """A worker that replies to pings. It starts a child process, like some environments do."""

    def __init__(self, worker_id: str, index: int, incarnation: int, closes: bool = True) -> None:
        self._alive = Alive(worker_id, incarnation, "idle")
        self._closes = closes
        self.child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL
        )
        print(f"{worker_id} is up as incarnation {incarnation}", flush=True)

    def ping(self) -> Alive:
        return self._alive

    def pid(self) -> int:
        return os.getpid()

    def resources(self) -> dict[str, str]:
        return dict(os.environ)  # /proc would not work: the process title overwrites the environment there

    def not_a_call(self) -> None:
        """Do nothing. The operator must not serve this method."""

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        print("closed", flush=True)
        if not self._closes:
            threading.Event().wait(600)


def make_idle_worker(worker_id: str, index: int, incarnation: int) -> TinyWorker:
    return TinyWorker(worker_id, index, incarnation)


def make_unclosable_worker(worker_id: str, index: int, incarnation: int) -> TinyWorker:
    return TinyWorker(worker_id, index, incarnation, closes=False)


def fail_permanently(worker_id: str, index: int, incarnation: int) -> TinyWorker:
    raise UsageError(f"No environment is called {worker_id!r}.")


def kill_own_process(worker_id: str, index: int, incarnation: int) -> TinyWorker:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class CrashingMaker:
    """A maker that writes one line to a file for each incarnation, and then raises."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, worker_id: str, index: int, incarnation: int) -> TinyWorker:
        with pathlib.Path(self.path).open("a") as file:
            file.write(f"{incarnation}\n")
        raise RuntimeError("cannot live")
