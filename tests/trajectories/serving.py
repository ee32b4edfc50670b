"""The real service in a process of its own, for tests: on a free port, killed and started again as a test likes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE = 60.0  # seconds for the service to start or end, on a machine that is busy


class ServiceProcess:
    """`rlframe serve trajectories`, with its files in `folder`.

    Attributes:
        url: without a slash at its end; a restart keeps it.
        process: the process, None while it is killed.
        printed: what it said when it started.
    """

    def __init__(self, folder: pathlib.Path, *arguments: str) -> None:
        self._folder = folder
        self._arguments = arguments if "--store" in arguments else (*arguments, "--store", f"sqlite:{folder}/queue.db")
        self._port = "0"
        self.log = folder / "service.log"  # its stderr
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "rlframe", "serve", "trajectories", "--port", self._port, *self._arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self.printed = self._lines(2)
        except BaseException:
            self.kill()
            raise
        self.url = next(word for word in self.printed.split() if word.startswith("http://"))
        self._port = self.url.rpartition(":")[2]

    def kill(self) -> None:
        """kill -9"""
        if self.process is not None:
            self.process.kill()
            self._gone()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Tells it to end, and returns its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self._gone()

    def restart(self) -> None:
        """kill -9, and again on the same files and the same port."""
        self.kill()
        self.start()

    def _gone(self) -> int:
        assert self.process is not None and self.process.stdout is not None
        code = self.process.wait(DEADLINE)
        self.process.stdout.close()
        self.process = None
        return code

    def _lines(self, count: int) -> str:
        """The first lines that it prints; it listens from before the first one on."""
        assert self.process is not None and self.process.stdout is not None
        end = time.monotonic() + DEADLINE
        printed = ""
        os.set_blocking(self.process.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while printed.count("\n") < count:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise RuntimeError(f"The service did not start within {DEADLINE:.0f} s:\n{self.log.read_text()}")
                if not (more := os.read(self.process.stdout.fileno(), 65536)):
                    raise RuntimeError(f"The service ended:\n{printed}{self.log.read_text()}")
                printed += more.decode()
        return printed


@contextlib.contextmanager
def running_service(tmp_path: pathlib.Path, *arguments: str) -> Iterator[ServiceProcess]:
    """A service for the time of the `with`, in SQLite under `tmp_path` unless `arguments` name another --store."""
    service = ServiceProcess(tmp_path, *arguments)
    try:
        yield service
    finally:
        service.kill()


def outer_address() -> str:
    """An address of this machine that is not loopback. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("This machine has no address but loopback.")
        return probe.getsockname()[0]


@contextlib.contextmanager
def under_uvicorn(
    folder: pathlib.Path, *arguments: str, app: Sequence[str] = ("rlframe.trajectories.server:app",), **settings: str
) -> Iterator[tuple[int, str]]:
    """(port, what it said on stderr until it ran) of the application as uvicorn serves it."""
    told = {f"RLFRAME_TRAJECTORIES_{name.upper()}": value for name, value in settings.items()}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "uvicorn",
            *app,
            "--port",
            "0",
            *arguments,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **told},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, found = "", None
        while found is None:
            line = process.stderr.readline()
            said += line
            assert line, said
            found = re.search(r"running on http://[\d.]+:(\d+)", line)
        yield int(found[1]), said
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE)
