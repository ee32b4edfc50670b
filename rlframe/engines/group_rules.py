"""`TRAITS` has the traits of each group of nodes. `rules_by_group` derives the rules for the groups of a program.

The rules for `heavy_env` with 4 actors, on 8 cores:

    group    max_restarts  ends_program  must_save  env
    learner  3             no            yes        NPROC=4 (cores without an actor); accelerators are visible
    actor    3             no            no         ON_CPU: one thread, no accelerator
    monitor  3             yes           no         ON_CPU

A monitor or a learner can end a program. Here, the monitor ends it, because `TRAITS` lists the monitor first.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from rlframe.engines.devices import NO_ACCELERATOR, PRECISION, share_memory

AcceleratorGroup = Literal["learner", "inferencer", "policy"]  # groups whose nodes may use accelerators


@dataclasses.dataclass(frozen=True)
class GroupTraits:
    """The traits of a group of nodes, in any program.

    Attributes:
        may_end_program: the program ends when this group's single node ends. If a program has several groups with this
            trait, the first of them in `TRAITS` ends it.
        saves: the nodes save when they end. A stopped program counts as saved only if these nodes exit with code 0.
        takes_idle_cores: the nodes use the cores that other groups leave idle, because too many threads would
            slow each other down. Several groups with this trait work in turns, and each group uses all idle cores.
        is_busy: the nodes work all the time. Under Ray, each node reserves a CPU if there are enough CPUs.
        uses_one_arena: the processes use one arena of malloc (`rlframe.interprocess.memory`).
    """

    may_end_program: bool = False
    saves: bool = False
    takes_idle_cores: bool = False
    is_busy: bool = False
    uses_one_arena: bool = False


# Groups that are not listed have no traits.
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

# Environment variables for nodes without an accelerator: JAX and numerical libraries use one thread of the CPU.
ON_CPU = {
    **NO_ACCELERATOR,
    "NPROC": "1",  # one thread for XLA; XLA's own flag for a single thread would also select slower kernels
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class GroupRules:
    """The rules for the nodes of one group of a program."""

    # Maximum number of restarts of each node, at the same address. The default is 0, because the nodes of a user's
    # program may not support restarts. The topologies of this package use `NodeOptions.max_restarts`.
    max_restarts: int = 0
    ends_program: bool = False  # the program ends successfully when the nodes of all such groups exit with code 0
    must_save: bool = False  # the nodes save when the program is stopped; an exit code other than 0 means a failed save
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)  # environment variables; None removes one


def traits_of(group: str) -> GroupTraits:
    """Return the traits of a group."""
    return TRAITS.get(group, GroupTraits())


def ending_group(groups: Collection[str]) -> str | None:
    """Return the group that ends a program, such as "monitor". None means that the program ends with its last node."""
    return next((group for group, traits in TRAITS.items() if traits.may_end_program and group in groups), None)


def rules_by_group(
    groups: Mapping[str, int], max_restarts: int, accelerators: Iterable[str], one_machine: bool = True
) -> dict[str, GroupRules]:
    """Return the rules of each group of a program.

    Args:
        groups: number of nodes in each group.
        max_restarts, accelerators: see `NodeOptions`.
        one_machine: True if all nodes run on this machine. Otherwise the groups that take idle cores get all cores of
            their machines, because this process knows neither the cores nor the other nodes there.
    """
    ending = ending_group(groups)
    return {
        group: GroupRules(
            max_restarts=max_restarts,
            ends_program=group == ending,
            must_save=traits_of(group).saves,
            env=_env_of_group(group, groups, accelerators, one_machine),
        )
        for group in groups
    }


def _env_of_group(
    group: str, groups: Mapping[str, int], accelerators: Iterable[str], one_machine: bool
) -> dict[str, str]:
    """Return the environment variables that set the cores and accelerators of a group's nodes."""
    idle = {"NPROC": str(_idle_cores(groups))} if one_machine else {}
    found = idle if traits_of(group).takes_idle_cores else dict(ON_CPU)
    if PRECISION in os.environ:  # processes on other machines do not inherit it
        found[PRECISION] = os.environ[PRECISION]
    if group not in accelerators:
        return {**found, **NO_ACCELERATOR}
    found = {name: value for name, value in found.items() if name not in NO_ACCELERATOR}
    return {**found, **share_memory(sum(count for name, count in groups.items() if name in accelerators))}


def _idle_cores(groups: Mapping[str, int]) -> int:
    """Return the number of cores that remain if each busy node uses one. The node that ends the program uses none."""
    ending = ending_group(groups)
    used = sum(count for name, count in groups.items() if name != ending and not traits_of(name).takes_idle_cores)
    return max(1, len(os.sched_getaffinity(0)) - used)
