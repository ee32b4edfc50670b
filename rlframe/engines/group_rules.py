"""The rules of groups: what restarts, what ends the program, what must save, who gets accelerators and cores.

`rules_by_group` derives them from the names of the groups. For `heavy_env` with 4 actors, on 8 cores:

    group    max_restarts  ends_program  must_save  env
    learner  3             no            yes        NPROC=4: the cores that the actors leave; it sees accelerators
    actor    3             no            no         ON_CPU: one thread, no accelerator
    monitor  3             yes           no         ON_CPU
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping

from rlframe.engines.base import EngineOptions

# The groups whose nodes save when they end. If a program is stopped, everything is saved only if these ended well.
SAVING_GROUPS = ("learner", "replay", "coordinator")

# A program ends with the first of these groups that it has. Each has one node.
_ENDING_GROUPS = ("coordinator", "monitor", "learner")

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


@dataclasses.dataclass(frozen=True)
class GroupRules:
    """The rules for the nodes of one group (label) of a program."""

    # Each node is started again, at the same address, until it has died more often than this. The default suits any
    # program, since its nodes may not bear a restart; those of our topologies do (`NodeOptions.max_restarts`).
    max_restarts: int = 0
    ends_program: bool = False  # the program is over, and well, when the nodes of all such groups have ended well
    must_save: bool = False  # a program that is stopped has ended well only if these nodes have, since they save then
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)  # environment variables; None: removed


def ending_group(groups: Iterable[str]) -> str | None:
    """Return the group whose end is the program's: of `heavy_env`, "monitor". None: it ends with its last node."""
    there = set(groups)
    return next((group for group in _ENDING_GROUPS if group in there), None)


def rules_by_group(groups: Mapping[str, int], options: EngineOptions) -> dict[str, GroupRules]:
    """Return the rules of each group of a program.

    Args:
        groups: how many nodes each has.
        options: of the engine.
    """
    ending = ending_group(groups)
    return {
        group: GroupRules(
            max_restarts=options.max_restarts,
            ends_program=group == ending,
            must_save=group in SAVING_GROUPS,
            env=_env_of_group(group, groups, options.accelerators),
        )
        for group in groups
    }


def _env_of_group(group: str, groups: Mapping[str, int], accelerators: Iterable[str]) -> dict[str, str]:
    """Return the environment variables that give the nodes of a group their cores and accelerators."""
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
    idle = (*_WIDE_GROUPS, ending_group(groups))
    busy = sum(count for name, count in groups.items() if name not in idle)
    return max(1, len(os.sched_getaffinity(0)) - busy)
