"""Start the real trajectory service in a separate process, for tests that kill and restart the service."""

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
DEADLINE = 60.0  # maximum seconds in which the service starts or ends, even on a busy machine


class ServiceProcess:
    """A process that runs `rlframe serve trajectories`. Its files are in `folder`.

    Attributes:
        url: Address without a trailing slash. A restart keeps it.
        process: The process, or None while no process runs.
        printed: The output at startup.
    """

    def __init__(self, folder: pathlib.Path, *arguments: str) -> None:
        self._folder = folder
        self._arguments = arguments if "--store" in arguments else (*arguments, "--store", f"sqlite:{folder}/queue.db")
        self._port = "0"
        self.log = folder / "service.log"  # file with the process's stderr
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
        """Kill the service with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self._wait_for_exit()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self._wait_for_exit()

    def restart(self) -> None:
        """Kill the service with SIGKILL, and start it with the same files and port."""
        self.kill()
        self.start()

    def _wait_for_exit(self) -> int:
        assert self.process is not None and self.process.stdout is not None
        code = self.process.wait(DEADLINE)
        self.process.stdout.close()
        self.process = None
        return code

    def _lines(self, count: int) -> str:
        """Return the first lines of the output. The service listens before it prints them."""
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
    """Run a service during the `with` block. By default, its store is an SQLite file under `tmp_path`."""
    service = ServiceProcess(tmp_path, *arguments)
    try:
        yield service
    finally:
        service.kill()


def outer_address() -> str:
    """Return this machine's IP address on the network, not the loopback address. Send no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("This machine has only loopback addresses.")
        return probe.getsockname()[0]


@contextlib.contextmanager
def under_uvicorn(
    folder: pathlib.Path, *arguments: str, app: Sequence[str] = ("rlframe.trajectories.server:app",), **settings: str
) -> Iterator[tuple[int, str]]:
    """Serve the application with uvicorn. When uvicorn is ready, yield its port and the text on stderr until then."""
    variables = {f"RLFRAME_TRAJECTORIES_{name.upper()}": value for name, value in settings.items()}
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
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, found = "", None
        while found is None:
            line = process.stderr.readline()
            output += line
            assert line, output
            found = re.search(r"running on http://[\d.]+:(\d+)", line)
        yield int(found[1]), output
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE)
