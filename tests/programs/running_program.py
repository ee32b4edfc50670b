"""Run `rlframe train --topology ...` as a process, and kill or stop its nodes."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.extras import needs
from tests.waiting import is_process_alive

ROOT = pathlib.Path(__file__).parents[2]

# Each actor has 4 environments. An update needs only 80 steps, so that a run of a few seconds makes many updates.
IMPALA = ["--agent", "impala", "--env", "CartPole-v1", "--num-envs", "8", "--num-actors", "2"]


# Each entry is an engine and a topology. `distributed` uses Reverb with Launchpad, and the replay service with other
# engines. Each Ray program starts its own Ray cluster; tests/engines/test_ray.py tests an existing cluster.
PROGRAMS = (
    "local heavy_env",
    "local light_env",
    "local distributed",
    "launchpad heavy_env",
    "launchpad light_env",
    "launchpad distributed",
    "ray heavy_env",
    "ray light_env",
    "ray distributed",
)
WITH_ELASTIC = (*PROGRAMS, "local elastic")
# Programs for tests that run with every agent. Ray needs only one topology, because it runs the same nodes as `local`.
FOR_EACH_AGENT = tuple(one for one in WITH_ELASTIC if one not in ("ray heavy_env", "ray light_env"))
# `make test` runs only the first entry. `make test-system` runs all entries.
GRID = [pytest.param(one, marks=[] if one == PROGRAMS[0] else pytest.mark.system) for one in PROGRAMS]


def options_of(program: str) -> list[str]:
    """Return the command-line options for an entry of `PROGRAMS`. Skip the test if a package is not installed."""
    engine, topology = program.split()
    if engine == "launchpad":
        needs("launchpad", *(["reverb"] if topology == "distributed" else []))
    if engine == "ray":
        needs("ray")
    return ["--engine", engine, "--topology", topology]


class RunningProgram:
    """A process of `rlframe train`. At the end of the context, kill it, and check that no process remains.

    Args:
        run_dir: The run directory.
        arguments: Arguments of `rlframe train`.
    """

    def __init__(self, run_dir: pathlib.Path, *arguments: str) -> None:
        self.run_dir = run_dir
        home = {"HOME": str(run_dir.parent)} if "ray" in arguments else {}  # Ray writes a token to the home directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlframe", "train", *arguments, "--run-dir", str(run_dir), "--json"],
            cwd=ROOT,
            env={**os.environ, **home},
            stdout=subprocess.PIPE,
            stderr=(run_dir.parent / "stderr").open("w"),
            text=True,
        )
        self._seen: dict[int, psutil.Process] = {}
        self._blocks: set[str] = set()  # paths of shared memory that the nodes created

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, kind: Any, *exc: Any) -> None:
        self.process.kill()
        self.process.communicate()
        if kind is None:
            self.check_nothing_is_left()

    def nodes(self) -> dict[str, psutil.Process]:
        """Return a dict from name, such as "actor 1", to the process of each running node."""
        children = _children(self.process.pid)
        for child in children:
            self._seen[child.pid] = child
            self._blocks |= _named_blocks(child)
        return _by_title(children)

    def alive(self) -> dict[str, psutil.Process]:
        """Return a dict from name to process of all living nodes, including nodes whose parent has exited."""
        self.nodes()
        return _by_title([process for process in self._seen.values() if is_process_alive(process)])

    def node(self, name: str) -> psutil.Process:
        """Wait until a node with this name is running, and return its process."""
        found: dict[str, psutil.Process] = {}
        self.wait_until(lambda: found.update(self.nodes()) or name in found)
        return found[name]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a node (SIGKILL or SIGSTOP), and wait until the node is restarted."""
        node = self.node(name)
        node.send_signal(number)

        def is_back() -> bool:
            found = self.nodes().get(name)
            return found is not None and found.pid != node.pid

        self.wait_until(is_back)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the file `metrics.jsonl`."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_steps(self, steps: int, seconds: float = 120.0) -> None:
        """Wait until a row of the logs has at least `steps` environment steps and at least one update."""
        self.wait_until(
            lambda: any(row["step"] >= steps and row.get("learner_steps", 0) > 0 for row in self.rows()), seconds
        )

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        """Wait until the condition is true. Fail if the program exits or the timeout expires."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"exit code {self.process.returncode}:\n{self.errors()}"
            assert time.monotonic() < deadline, f"timeout:\n{self.errors()}"
            time.sleep(0.05)

    def errors(self) -> str:
        """Return the stderr of the program."""
        return (self.run_dir.parent / "stderr").read_text()

    def finish(self, seconds: float = 240.0) -> tuple[int, dict[str, Any] | None]:
        """Wait until the program exits. Return the exit code, and the result or None."""
        self.nodes()
        out, _ = self.process.communicate(timeout=seconds)
        self.check_nothing_is_left()
        lines = out.splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else None

    def check_nothing_is_left(self) -> None:
        """Check that all processes have exited, and that all shared memory is removed."""
        deadline = time.monotonic() + 120.0  # Ray is slow on a busy machine
        while alive := [child for child in self._seen.values() if is_process_alive(child)]:
            assert time.monotonic() < deadline, f"{[(child.pid, _cmdline(child)) for child in alive]} are still alive"
            time.sleep(0.05)
        assert not [block for block in self._blocks if os.path.exists(block)]


def stop_signal(program: RunningProgram, number: int = signal.SIGINT) -> float:
    """Send a signal to the launcher, and wait until it exits. Return the number of seconds that this takes."""
    program.nodes()
    began = time.monotonic()
    program.process.send_signal(number)
    program.process.wait(timeout=30.0)
    return time.monotonic() - began


def _by_title(processes: list[psutil.Process]) -> dict[str, psutil.Process]:
    titles = {process: re.match(r"rlframe: (.*)", " ".join(_cmdline(process)).strip()) for process in processes}
    return {title[1]: process for process, title in titles.items() if title}


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _named_blocks(process: psutil.Process) -> set[str]:
    try:
        return {it.path for it in process.memory_maps() if it.path.startswith("/dev/shm/")}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return set()
