"""Workers that do nothing but answer, for tests of how they are started and ended. Importable by their processes."""

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
    """Answers pings, and has a process of its own, as some environments do."""

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
        return dict(os.environ)  # not by /proc: the process's title is written over what is seen there

    def not_a_call(self) -> None:
        """Is not served."""

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        print("closed", flush=True)
        if not self._closes:
            threading.Event().wait(600)


def quiet(worker_id: str, index: int, incarnation: int) -> TinyWorker:
    return TinyWorker(worker_id, index, incarnation)


def never_closes(worker_id: str, index: int, incarnation: int) -> TinyWorker:
    return TinyWorker(worker_id, index, incarnation, closes=False)


def broken(worker_id: str, index: int, incarnation: int) -> TinyWorker:
    raise UsageError(f"No environment is called {worker_id!r}.")


def kills_itself(worker_id: str, index: int, incarnation: int) -> TinyWorker:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Counts:
    """Leaves a line per life in a file, then dies."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, worker_id: str, index: int, incarnation: int) -> TinyWorker:
        with pathlib.Path(self.path).open("a") as file:
            file.write(f"{incarnation}\n")
        raise RuntimeError("cannot live")
