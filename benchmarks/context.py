"""What every benchmark is given: where the peers are, how long to measure, and how to run a script apart."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import NotMeasured

ROOT = Path(__file__).absolute().parents[1]  # links are not followed: see `benchmarks.against`
OLD_RUNTIME = {"XLA_FLAGS": "--xla_cpu_use_thunk_runtime=false"}


@dataclasses.dataclass(frozen=True)
class Context:
    """How the benchmarks of one run are done."""

    peers_python: Path | None = None  # of an environment with Stable-Baselines3, CleanRL's libraries, cpprb, flashbax
    cleanrl: Path | None = None  # a checkout of CleanRL
    repeats: int = 3  # each contender runs so often, in turns; the table shows medians
    quick: bool = False  # one short turn: to see that everything runs
    only_ours: bool = False  # neither peers nor bare twins
    timeout: float = 900.0  # seconds for one script

    def steps(self, full: int, quick: int) -> int:
        """`full`, or `quick` in a quick run."""
        return quick if self.quick else full

    def ours(self, name: str, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Runs `benchmarks/ours/NAME.py` in a process of its own and returns what it printed."""
        return self._run([sys.executable, "-m", f"benchmarks.ours.{name}"], arguments, env)

    def bare(self, name: str, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Runs `benchmarks/peers/NAME.py`, a twin without a framework, with this Python.

        Raises:
            NotMeasured: only rlframe is measured, or the script failed.
        """
        if self.only_ours:
            raise NotMeasured("left out")
        return self._run([sys.executable, str(ROOT / "benchmarks/peers" / f"{name}.py")], arguments, env)

    def peer(self, name: str, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Runs `benchmarks/peers/NAME.py` with the peers' Python.

        Raises:
            NotMeasured: there is no such Python, or the script failed.
        """
        if self.peers_python is None or self.only_ours:
            raise NotMeasured("left out" if self.only_ours else "--peers-python was not given")
        return self._run([str(self.peers_python), str(ROOT / "benchmarks/peers" / f"{name}.py")], arguments, env)

    def cleanrl_script(self, script: str, own: tuple[Any, ...], arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Times one of CleanRL's scripts; see `benchmarks/peers/cleanrl_script.py`."""
        if self.cleanrl is None or self.only_ours:
            raise NotMeasured("left out" if self.only_ours else "--cleanrl was not given")
        return self.peer("cleanrl_script", self.cleanrl, script, *own, "--", *arguments)

    def _run(self, command: list[str], arguments: tuple[Any, ...], env: dict[str, str] | None) -> dict[str, Any]:
        command = [*command, *map(str, arguments)]
        started = {"RLFRAME_BENCH_STARTED": repr(time.time())}  # so that imports count where wall time is asked for
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **started, **(env or {})},
                capture_output=True,
                text=True,
                timeout=self.timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise NotMeasured(f"no result after {self.timeout:.0f} s") from error
        except OSError as error:
            raise NotMeasured(f"cannot run {command[0]}: {error.strerror}") from error
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            said = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
            raise NotMeasured(f"{Path(command[1]).name} exited with {done.returncode}: {said[:160]}")
        return json.loads(lines[-1])


def in_turns(
    contenders: dict[str, Callable[[], dict[str, Any]]], repeats: int, say: Callable[[str], None]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Runs the contenders in turns, so that a slow minute of the machine is everyone's.

    Returns:
        (results by name, one for each turn; why there is none, by name).
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    failures: dict[str, str] = {}
    for turn in range(repeats):
        for name, run in contenders.items():
            if name in failures:
                continue
            say(f"{name}, turn {turn + 1} of {repeats}")
            try:
                results[name].append(run())
            except NotMeasured as reason:
                failures[name] = f"not measured: {reason}"
    return results, failures
