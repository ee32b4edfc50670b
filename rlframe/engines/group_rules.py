"""What the name of a group decides about its nodes: `TRAITS`. And the rules that follow for a program.

`rules_by_group` derives the rules. For `heavy_env` with 4 actors, on 8 cores:

    group    max_restarts  ends_program  must_save  env
    learner  3             no            yes        NPROC=4: the cores that the actors leave; it sees accelerators
    actor    3             no            no         ON_CPU: one thread, no accelerator
    monitor  3             yes           no         ON_CPU

The monitor ends this program, not the learner: both may, and the monitor is the first of them in `TRAITS`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

AcceleratorGroup = Literal["learner", "inferencer", "policy"]  # groups whose nodes may use accelerators


@dataclasses.dataclass(frozen=True)
class GroupTraits:
    """What the name of a group decides about its nodes, in any program.

    Attributes:
        may_end_program: the program ends with this group if no group before it in `TRAITS` does. It has one node.
        saves: its nodes save when they end. If a program is stopped, everything is saved only if they ended well.
        takes_idle_cores: its nodes have the cores that the others leave: more threads than cores slow each other. If
            there are several such groups, they work in turns.
        is_busy: its nodes are at work all the time. Under Ray, each has a CPU, if there are enough.
        uses_one_arena: its processes use one arena of malloc (`rlframe.interprocess.malloc`).
    """

    may_end_program: bool = False
    saves: bool = False
    takes_idle_cores: bool = False
    is_busy: bool = False
    uses_one_arena: bool = False


# A group that is not here has none of these traits.
TRAITS: Mapping[str, GroupTraits] = {
    "coordinator": GroupTraits(may_end_program=True, saves=True),
    "monitor": GroupTraits(may_end_program=True),
    "learner": GroupTraits(may_end_program=True, saves=True, takes_idle_cores=True, uses_one_arena=True),
    "replay": GroupTraits(saves=True),
    "policy": GroupTraits(takes_idle_cores=True),
    "actor": GroupTraits(is_busy=True),
    "inferencer": GroupTraits(is_busy=True),
    "collector": GroupTraits(is_busy=True),
}

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


@dataclasses.dataclass(frozen=True)
class GroupRules:
    """The rules for the nodes of one group of a program."""

    # Each node is started again, at the same address, until it has died more often than this. The default suits any
    # program, since its nodes may not bear a restart; those of our topologies do (`NodeOptions.max_restarts`).
    max_restarts: int = 0
    ends_program: bool = False  # the program is over, and well, when the nodes of all such groups have ended well
    must_save: bool = False  # a program that is stopped has ended well only if these nodes have, since they save then
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)  # environment variables; None: removed


def traits_of(group: str) -> GroupTraits:
    """Return the traits of a group."""
    return TRAITS.get(group, GroupTraits())


def ending_group(groups: Collection[str]) -> str | None:
    """Return the group whose end is the program's: of `heavy_env`, "monitor". None: it ends with its last node."""
    return next((group for group, traits in TRAITS.items() if traits.may_end_program and group in groups), None)


def rules_by_group(groups: Mapping[str, int], max_restarts: int, accelerators: Iterable[str]) -> dict[str, GroupRules]:
    """Return the rules of each group of a program.

    Args:
        groups: how many nodes each has.
        max_restarts, accelerators: see `NodeOptions`.
    """
    ending = ending_group(groups)
    return {
        group: GroupRules(
            max_restarts=max_restarts,
            ends_program=group == ending,
            must_save=traits_of(group).saves,
            env=_env_of_group(group, groups, accelerators),
        )
        for group in groups
    }


def _env_of_group(group: str, groups: Mapping[str, int], accelerators: Iterable[str]) -> dict[str, str]:
    """Return the environment variables that give the nodes of a group their cores and accelerators."""
    found = {"NPROC": str(_idle_cores(groups))} if traits_of(group).takes_idle_cores else dict(ON_CPU)
    if group not in accelerators:
        return {**found, **NO_ACCELERATOR}
    found = {name: value for name, value in found.items() if name not in NO_ACCELERATOR}
    # If several nodes share an accelerator, none may take all of its memory.
    if sum(count for name, count in groups.items() if name in accelerators) > 1 and _PREALLOCATES not in os.environ:
        found[_PREALLOCATES] = "false"
    return found


def _idle_cores(groups: Mapping[str, int]) -> int:
    """Return the cores that are left if each other node has one; the node that ends the program has none."""
    ending = ending_group(groups)
    used = sum(count for name, count in groups.items() if name != ending and not traits_of(name).takes_idle_cores)
    return max(1, len(os.sched_getaffinity(0)) - used)
