"""Every figure of the table in docs/howto/accelerators.md: `python -m benchmarks.accelerator`, in about ten minutes.

Each case runs on 1, 2, 4, ... devices of this machine, in a new process. On an accelerator, the command stores
the figures in benchmarks/accelerator.json and writes the page. On a CPU it only prints them. `--quick` uses small
sizes, to check that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.context import ROOT, Context
from benchmarks.report import NotMeasured, format_number, machine

PAGE, RECORDS = ROOT / "docs/howto/accelerators.md", ROOT / "benchmarks/accelerator.json"

_TABLE = re.compile(r"(<!-- table: accelerator -->\n).*?(<!-- end -->)", re.DOTALL)
_DEVICES = "import jax; print(jax.default_backend(), jax.local_device_count(), jax.devices()[0].device_kind, sep='|')"


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    title: str
    unit: str
    script: str  # in benchmarks/ours
    arguments: tuple[Any, ...]
    quick: tuple[Any, ...]  # arguments with small sizes
    value: str  # key of the figure in the result of the script


def _train(name: str, steps: int, env: str, topology: str) -> tuple[Any, ...]:
    numbers = ("--steps", steps, "--total", steps, "--warm-up", steps // 4, "--log-every", max(1, steps // 40))
    return (name, *numbers, "--env", env, "--topology", topology)


RATE = "steps_per_second"
CASES = (
    Case(
        "PPO, `fused`, `jax:CartPole-v1`, 2,048 environments x 128 steps",
        "environment steps/s",
        "train",
        _train("ppo_purejaxrl_2048", 50_000_000, "jax:CartPole-v1", "fused"),
        _train("ppo_purejaxrl_64", 200_000, "jax:CartPole-v1", "fused"),
        RATE,
    ),
    Case(
        "PQN, `fused`, `jax:Breakout-MinAtar`, 1,024 environments x 32 steps",
        "environment steps/s",
        "train",
        _train("pqn_1024", 20_000_000, "jax:Breakout-MinAtar", "fused"),
        _train("pqn_8", 4_000, "jax:Breakout-MinAtar", "fused"),
        RATE,
    ),
    Case(
        "PPO, `Pong-v5` in EnvPool, 8 environments x 128 steps",
        "environment steps/s",
        "train",
        _train("ppo_pong", 200_000, "Pong-v5", "single_process"),
        _train("ppo_pong", 6_000, "Pong-v5", "single_process"),
        RATE,
    ),
    Case(
        "SAC, two layers of 256, batches of 256",
        "updates/s",
        "learner",
        ("sac", "--seconds", 20),
        ("sac", "--seconds", 1),
        "updates_per_second",
    ),
    Case(
        "GRPO, random model with the shape of a 0.5B one, 32 sequences of 512 tokens",
        "tokens/s",
        "grpo",
        ("half_billion", "--seconds", 30),
        ("tiny", "--seconds", 1),
        "tokens_per_second",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, and print the table. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that everything runs")
    parser.add_argument("--devices", help="numbers of devices, such as 1,2,4; the default is all powers of two")
    args = parser.parse_args(arguments)
    backend, there, kind = _devices()
    counts = [2**power for power in range(there.bit_length()) if 2**power <= there]
    if args.devices is not None:
        counts = [int(count) for count in args.devices.split(",")]
    context = Context(quick=args.quick)
    figures = {case.title: [_measure(context, case, count) for count in counts] for case in CASES}
    found = {"date": datetime.date.today().isoformat(), "machine": f"{kind}; {machine()}", "counts": counts}
    record = {**found, "figures": figures}
    print(table(record))
    if args.quick:
        print("These are small sizes (--quick), which say nothing about speed.")
    if backend != "cpu" and not args.quick:
        RECORDS.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(page(PAGE.read_text(), record))
    return 0


def _devices() -> tuple[str, int, str]:
    """Ask JAX in another process, because this one must not take memory of the devices."""
    done = subprocess.run([sys.executable, "-c", _DEVICES], capture_output=True, text=True, check=True)
    backend, count, kind = done.stdout.strip().splitlines()[-1].split("|")
    return backend, int(count), kind


def _measure(context: Context, case: Case, count: int) -> float | None:
    print(f"  {case.title}, devices: {count} ...", file=sys.stderr, flush=True)
    arguments = case.quick if context.quick else case.arguments
    option = () if count == 1 else ("--devices", count)
    try:
        return context.ours(case.script, *arguments, *option)[case.value]
    except NotMeasured as error:
        print(f"    not measured: {error}", file=sys.stderr, flush=True)
        return None


def table(record: Mapping[str, Any] | None) -> str:
    """Return the table in Markdown. Cells without a figure say so. None means that nothing was measured."""
    counts = record["counts"] if record is not None else [1, 2, 4, 8]
    lines = ["| measured | unit | " + " | ".join(f"{count} device{'s' * (count > 1)}" for count in counts) + " |"]
    lines.append("|---" * (len(counts) + 2) + "|")
    for case in CASES:
        values = [None] * len(counts) if record is None else record["figures"].get(case.title, [None] * len(counts))
        cells = ["not measured" if value is None else format_number(value) for value in values]
        lines.append(f"| {case.title} | {case.unit} | {' | '.join(cells)} |")
    lines += ["", "Never run." if record is None else f"Measured on {record['machine']}, {record['date']}.", ""]
    return "\n".join(lines)


def page(text: str, record: Mapping[str, Any] | None) -> str:
    """Return the page's text with the table of `record`."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{table(record)}{match[2]}", text)


def stored() -> dict[str, Any] | None:
    """Return the newest record, or None."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else None


if __name__ == "__main__":
    sys.exit(main())
