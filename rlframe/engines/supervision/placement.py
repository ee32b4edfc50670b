"""The rules for each group of a program: accelerators, threads, restarts, and what its end means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from rlframe.engines.base import SAVING_GROUPS, EngineOptions, deciding_group
from rlframe.engines.supervision.running import GroupRules

NO_ACCELERATOR = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}

# JAX and numerical libraries with one thread, on the CPU.
ON_CPU = {
    **NO_ACCELERATOR,
    "NPROC": "1",  # XLA's threads; its flag for a single one takes slower kernels too
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

_PREALLOCATES = "XLA_PYTHON_CLIENT_PREALLOCATE"

# Groups that have the cores which the others leave: more threads than cores slow each other. They work in turns.
_WIDE_GROUPS = ("learner", "policy")


def group_rules(groups: Mapping[str, int], options: EngineOptions) -> dict[str, GroupRules]:
    """Return the rules of each group.

    Args:
        groups: how many nodes each has.
        options: of the engine.
    """
    decides = deciding_group(groups)
    return {
        group: GroupRules(
            max_restarts=options.max_restarts,
            decides=group == decides,
            saves=group in SAVING_GROUPS,
            env=_variables(group, groups, options.accelerators),
        )
        for group in groups
    }


def _variables(group: str, groups: Mapping[str, int], accelerators: Iterable[str]) -> dict[str, str]:
    found = {"NPROC": str(_cores_left(groups))} if group in _WIDE_GROUPS else dict(ON_CPU)
    if group not in accelerators:
        return {**found, **NO_ACCELERATOR}
    for name in NO_ACCELERATOR:
        found.pop(name, None)
    # If several nodes share an accelerator, none may take all of its memory.
    if sum(count for name, count in groups.items() if name in accelerators) > 1 and _PREALLOCATES not in os.environ:
        found[_PREALLOCATES] = "false"
    return found


def _cores_left(groups: Mapping[str, int]) -> int:
    idle = (*_WIDE_GROUPS, deciding_group(groups))
    busy = sum(count for name, count in groups.items() if name not in idle)
    return max(1, len(os.sched_getaffinity(0)) - busy)
