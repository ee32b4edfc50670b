"""Functions that start small programs as processes, and wait for these processes."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import psutil

ROOT = pathlib.Path(__file__).parents[2]


def start(module: str, *arguments: str, cwd: pathlib.Path = ROOT, **env: str) -> subprocess.Popen[str]:
    """Start `python -m MODULE`, and read its stdout and stderr from pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait until a program and its nodes have ended. Return (exit code, stdout, output of the nodes)."""
    output, lines = process.communicate(timeout=240.0)
    print(lines)
    pids = {int(pid) for pid in re.findall(r"(?:server|client) (\d+) ", lines)}
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)
    return process.returncode, output, lines


def wait_for_nodes(process: subprocess.Popen[str], count: int = 3) -> set[int]:
    """Wait until `count` nodes have printed their process ids. Return these ids."""
    pids: set[int] = set()
    assert process.stderr is not None
    while len(pids) < count:
        line = process.stderr.readline()
        assert line, process.communicate()
        pids |= {int(pid) for pid in re.findall(r"(?:server|client) (\d+) ", line)}
    return pids
