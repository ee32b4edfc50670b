"""SAC on HalfCheetah-v4, one environment, an update of 256 every step: beside a bare loop of the same, and SBX's."""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor

LEARNING_STARTS, WARM_UP = 1_000, 500


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    steps = context.steps(6_000, 2_000)
    warm_up = LEARNING_STARTS + WARM_UP
    contenders = {
        "rlframe": lambda: context.ours("train", "sac", "--steps", steps, "--warm-up", warm_up, "--log-every", 100),
        "bare loop": lambda: context.bare("bare_sac", "--steps", steps, "--warm-up", warm_up),
        "SBX": lambda: context.peer("sbx_sac", "--steps", steps, "--warm-up", warm_up),
    }
    results, failures = in_turns(contenders, context.repeats, say)
    values = {name: middle(result.get("steps_per_second") for result in results[name]) for name in contenders}
    return [
        Table(
            "SAC on HalfCheetah-v4, an update of 256 every step",
            "environment steps/s",
            Row("rlframe", values["rlframe"], None, failures.get("rlframe", ""), processor(results["rlframe"])),
            tuple(
                Row(name, values[name], wanted, failures.get(name, ""))
                for name, wanted in (("bare loop", 0.85), ("SBX", 1.0))
            ),
        )
    ]
