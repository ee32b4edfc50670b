"""SAC on HalfCheetah-v4 with one environment and an update of 256 per step, compared with a bare loop and SBX."""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

LEARNING_STARTS, WARM_UP = 1_000, 500


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    steps = context.steps(6_000, 2_000)
    warm_up = LEARNING_STARTS + WARM_UP
    contenders = {
        "rlframe": lambda: context.ours("train", "sac", "--steps", steps, "--warm-up", warm_up, "--log-every", 100),
        "bare loop": lambda: context.bare("bare_sac", "--steps", steps, "--warm-up", warm_up),
        "SBX": lambda: context.peer("sbx_sac", "--steps", steps, "--warm-up", warm_up),
    }
    results, failures = run_interleaved(contenders, context.repeats, log)
    values = {name: median(result.get("steps_per_second") for result in results[name]) for name in contenders}
    return [
        Table(
            "SAC on HalfCheetah-v4, an update of 256 every step",
            "environment steps/s",
            Row("rlframe", values["rlframe"], None, failures.get("rlframe", ""), processor(results["rlframe"])),
            tuple(
                Row(name, values[name], target, failures.get(name, ""))
                for name, target in (("bare loop", 0.85), ("SBX", 1.0))
            ),
        )
    ]
