"""Time a short run of `rlframe train`, its imports and its compilation. Print one JSON object.

python -m benchmarks.ours.startup --steps 3000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile

from benchmarks.processor import Stopwatch

# Tracing is left out: its events are nested.
_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3_000)
    args = parser.parse_args()
    imports, _ = _time("-c", "import rlframe.cli.train")
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", "--env", "CartPole-v1", "--steps", str(args.steps), "--eval-episodes", "1", "--run-dir"]
        seconds, processor = _time("-m", "rlframe", *command, f"{folder}/command")
        compilation = _compilation_seconds([*command, f"{folder}/compilation"])
    result = {"command": seconds, "imports": imports, "compilation": compilation, "processor_us": 1e6 * processor}
    print(json.dumps(result))


def _time(*arguments: str) -> tuple[float, float]:
    """Run Python in a new process. Return its seconds of wall time and of processor time."""
    stopwatch = Stopwatch()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return stopwatch.seconds, stopwatch.processor_us(1) / 1e6


def _compilation_seconds(command: list[str]) -> float:
    """Run the command in this process. Return the seconds that JAX lowers and compiles, over all threads."""
    import jax

    from rlframe.cli.main import main as rlframe

    seconds: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: seconds.append(duration) if event in _EVENTS else None
    )
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        assert rlframe(command) == 0
    return sum(seconds)


if __name__ == "__main__":
    main()
