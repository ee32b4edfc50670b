"""Updates of a Learner on one device and on several devices of its process (`--devices 1,2`).

On a machine without accelerators, each device is simulated and has the CPU's threads in common with the others. The
table then shows the cost of dividing an update, and nothing about real devices.
"""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

CONFIGS = {
    "ppo": "PPO, MLP 64 x 64, 64 environments x 128 steps, 4 epochs of 4 minibatches",
    "ppo_large": "PPO, MLP 512 x 512, 64 environments x 128 steps, 4 epochs of 4 minibatches",
    "sac": "SAC, MLP 256 x 256, batches of 256",
    "dqn_fused": "prioritized DQN in `fused`, MLP 64 x 64, 64 environments, batches of 256",
}


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    return [_table(context, config, log) for config in CONFIGS]


def _table(context: Context, config: str, log) -> Table:
    seconds = context.steps(6, 1)
    contenders = {
        f"{count} device{'s' * (count > 1)}": lambda count=count: context.ours(
            "learner", config, "--devices", count, "--seconds", seconds
        )
        for count in context.devices
    }
    results, failures = run_interleaved(contenders, context.repeats, log)
    rows = [
        Row(
            name,
            median(each["updates_per_second"] for each in found),
            None,
            failures.get(name) or f"{median(each['moved_bytes'] for each in found) / 1e3:,.0f} kB moved",
            processor(found),
        )
        for name, found in results.items()
    ]
    return Table(f"Updates of a Learner: {CONFIGS[config]}", "updates/s", rows[0], tuple(rows[1:]))
