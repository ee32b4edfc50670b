"""The context of a benchmark: paths of the peers, durations, and functions to run scripts in processes."""

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

ROOT = Path(__file__).absolute().parents[1]  # links are not resolved, see `benchmarks.against`
OLD_RUNTIME = {"XLA_FLAGS": "--xla_cpu_use_thunk_runtime=false"}


@dataclasses.dataclass(frozen=True)
class Context:
    """Settings of the benchmarks in one run."""

    # Python of an environment with Stable-Baselines3, CleanRL's libraries, cpprb, flashbax
    peers_python: Path | None = None
    cleanrl: Path | None = None  # a checkout of CleanRL
    purejaxrl: Path | None = None  # a checkout of PureJaxRL
    purejaxrl_python: Path | None = None  # Python of an environment with its libraries
    repeats: int = 3  # turns of each contender; tables show medians
    quick: bool = False  # one short turn, to check that everything runs
    devices: tuple[int, ...] = (1, 2)  # numbers of devices of the benchmark `learner`
    only_ours: bool = False  # measure no peers and no bare loops
    timeout: float = 900.0  # seconds for one script

    def steps(self, full: int, quick: int) -> int:
        """Return `full`, or `quick` in a quick run."""
        return quick if self.quick else full

    def ours(self, name: str, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Run `benchmarks/ours/NAME.py` in a separate process and return its printed result."""
        return self._run([sys.executable, "-m", f"benchmarks.ours.{name}"], arguments, env)

    def bare(self, name: str, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Run `benchmarks/peers/NAME.py`, an equivalent without a framework, with this Python.

        Raises:
            NotMeasured: only rlframe is measured, or the script failed.
        """
        if self.only_ours:
            raise NotMeasured("left out")
        return self._run([sys.executable, str(ROOT / "benchmarks/peers" / f"{name}.py")], arguments, env)

    def peer(self, name: str, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Run `benchmarks/peers/NAME.py` with the Python of the peers.

        Raises:
            NotMeasured: this Python was not given, or the script failed.
        """
        if self.peers_python is None or self.only_ours:
            raise NotMeasured("left out" if self.only_ours else "--peers-python was not given")
        return self._run([str(self.peers_python), str(ROOT / "benchmarks/peers" / f"{name}.py")], arguments, env)

    def cleanrl_script(self, script: str, own: tuple[Any, ...], arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Time one of CleanRL's scripts; see `benchmarks/peers/cleanrl_script.py`."""
        if self.cleanrl is None or self.only_ours:
            raise NotMeasured("left out" if self.only_ours else "--cleanrl was not given")
        return self.peer("cleanrl_script", self.cleanrl, script, *own, "--", *arguments)

    def purejaxrl_ppo(self, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Time PureJaxRL's PPO; see `benchmarks/peers/purejaxrl_ppo.py`."""
        if self.purejaxrl is None or self.purejaxrl_python is None or self.only_ours:
            missing = "--purejaxrl" if self.purejaxrl is None else "--purejaxrl-python"
            raise NotMeasured("left out" if self.only_ours else f"{missing} was not given")
        script = ROOT / "benchmarks/peers/purejaxrl_ppo.py"
        return self._run([str(self.purejaxrl_python), str(script)], (self.purejaxrl.absolute(), *arguments), env)

    def _run(self, command: list[str], arguments: tuple[Any, ...], env: dict[str, str] | None) -> dict[str, Any]:
        command = [*command, *map(str, arguments)]
        started = {"RLFRAME_BENCH_STARTED": repr(time.time())}  # so that wall times can include imports
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
            last_line = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
            raise NotMeasured(f"{Path(command[1]).name} exited with {done.returncode}: {last_line[:160]}")
        return json.loads(lines[-1])


def run_interleaved(
    contenders: dict[str, Callable[[], dict[str, Any]]], repeats: int, log: Callable[[str], None]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the contenders in alternating turns, so that slow periods of the machine affect all of them.

    Returns:
        (results of each contender, one per turn; the reason why there is none, for each contender that failed).
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    failures: dict[str, str] = {}
    for turn in range(repeats):
        for name, run in contenders.items():
            if name in failures:
                continue
            log(f"{name}, turn {turn + 1} of {repeats}")
            try:
                results[name].append(run())
            except NotMeasured as reason:
                failures[name] = f"not measured: {reason}"
    return results, failures
