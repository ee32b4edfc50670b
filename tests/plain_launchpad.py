"""Run example scripts that call `lp.launch`, with an injected fault. Check how their processes end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil

ROOT = pathlib.Path(__file__).parents[1]
WITHIN = 30.0  # maximum seconds from a fault to the end of the program

RAISES_AT_STEP_100 = """
import gymnasium


class Raises(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 100:
            import time
            print(f"fault at {time.time():.1f}.")
            raise ValueError("a broken environment")
        return self.env.step(action)


def make_env():
    return Raises(gymnasium.make("CartPole-v1"))

"""

BROKEN_CONSTRUCTOR = """
from rlframe import Actor


class Broken(Actor):
    def __init__(self):
        import time
        print(f"fault at {time.time():.1f}.")
        raise ValueError("a broken constructor")

"""


def with_raising_environment(page: str) -> str:
    """Return the source of an example in which the environments of the actors raise an error at step 100."""
    return edited(edited(page, "\n\ndef env_builder", RAISES_AT_STEP_100 + "\n\ndef env_builder"),
                  'SyncEnv("CartPole-v1"', "SyncEnv(make_env")  # fmt: skip


def with_broken_constructor(page: str) -> str:
    """Return the source of an example with an additional node whose constructor raises an error."""
    page = edited(page, "\n\ndef env_builder", BROKEN_CONSTRUCTOR + "\n\ndef env_builder")
    group = '    with program.group("actor"):\n'
    return edited(page, group, f"{group}        program.add_node(lp.CourierNode(Broken))\n")


def edited(page: str, old: str, new: str) -> str:
    assert page.count(old) == 1, (old, page)
    return page.replace(old, new)


def example(name: str) -> str:
    return (ROOT / f"examples/{name}.py").read_text()


class Program:
    """A running script. The script has a new session and its own temporary directory.

    Args:
        script: source of the script.
        folder: directory of the script and of its temporary files.
        redirect: True redirects the script's output to `folder / "output.txt"`.
    """

    def __init__(self, script: str, folder: pathlib.Path, *, redirect: bool = False) -> None:
        (folder / "tmp").mkdir()
        (folder / "program.py").write_text(script)
        self.folder = folder
        self._shared = set(os.listdir("/dev/shm"))
        self._log = b""
        # a terminal, because Launchpad's `sed` would buffer output to a file
        self._terminal, written_to = pty.openpty()
        if redirect:
            os.close(written_to)
            written_to = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY)
        self.process = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder / "tmp")},
            stdout=written_to,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(written_to)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # All processes that write to the terminal have exited.
            while piece := os.read(self._terminal, 65536):
                self._log += piece

    def output(self) -> str:
        return self._log.decode(errors="replace")

    def wait_for(self, is_there: Callable[[], bool], seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < end, self.output()[-5000:]
            time.sleep(0.1)

    def wait_for_output(self, text: str) -> None:
        self.wait_for(lambda: text in self.output())

    def members(self) -> list[psutil.Process]:
        """Return the running processes of the session."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def guards(self) -> list[psutil.Process]:
        """Return the running guard processes of the nodes."""
        found = []
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("launchpad_nodes.guard" in argument for argument in process.cmdline()):
                    found.append(process)
        return found

    def ends_within(self, seconds: float = WITHIN) -> int:
        """Wait until all processes have ended, and check that no files are left. Return the script's exit code."""
        begin = time.monotonic()
        self.process.wait(seconds)
        self.wait_for(lambda: not self.members(), max(0.0, seconds - (time.monotonic() - begin)))
        assert not set(os.listdir("/dev/shm")) - self._shared
        self._reader.join(10.0)
        # Ignore directories: a Reverb server with the default checkpointer leaves an empty directory.
        left = [path for path in (self.folder / "tmp").rglob("*") if not path.is_dir()]
        assert not left, f"{left}\n{self.output()[-5000:]}"
        return self.process.returncode

    def close(self) -> None:
        for process in self.members():
            process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(10.0)
        os.close(self._terminal)
