"""`TRAITS` has the traits of each group of nodes. `rules_by_group` derives the rules for the groups of a program.

The rules for `heavy_env` with 4 actors, on 8 cores:

    group    max_restarts  ends_program  must_save  env
    learner  3             no            yes        NPROC=4 (cores without an actor); accelerators are visible
    actor    3             no            no         ON_CPU: one thread, no accelerator
    monitor  3             yes           no         ON_CPU

A monitor or a learner can end a program. Here, the monitor ends it, because `TRAITS` lists the monitor first.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

from rlframe import extras
from rlframe.interprocess.processes import environment_variable

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

NO_ACCELERATOR = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}

# Environment variables for nodes without an accelerator: JAX and numerical libraries use one thread of the CPU.
ON_CPU = {
    **NO_ACCELERATOR,
    "NPROC": "1",  # one thread for XLA; XLA's own flag for a single thread would also select slower kernels
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the share of an accelerator's memory that a process allocates
_PRECISION = "JAX_DEFAULT_MATMUL_PRECISION"
_MOST_MEMORY = 0.9  # the shares of all processes of a run on an accelerator, together


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


def rules_by_group(groups: Mapping[str, int], max_restarts: int, accelerators: Iterable[str]) -> dict[str, GroupRules]:
    """Return the rules of each group of a program.

    Args:
        groups: number of nodes in each group.
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
    """Return the environment variables that set the cores and accelerators of a group's nodes."""
    found = {"NPROC": str(_idle_cores(groups))} if traits_of(group).takes_idle_cores else dict(ON_CPU)
    if _PRECISION in os.environ:  # processes on other machines do not inherit it
        found[_PRECISION] = os.environ[_PRECISION]
    if group not in accelerators:
        return {**found, **NO_ACCELERATOR}
    found = {name: value for name, value in found.items() if name not in NO_ACCELERATOR}
    return {**found, **share_memory(sum(count for name, count in groups.items() if name in accelerators))}


def share_memory(processes: float) -> dict[str, str]:
    """Return the environment variables of `processes` processes that share an accelerator: each gets an equal share.

    One process uses JAX's default. Variables that the user has set are not changed.
    """
    if processes <= 1 or {MEMORY_SHARE, "XLA_PYTHON_CLIENT_PREALLOCATE"} & os.environ.keys():
        return {}
    return {MEMORY_SHARE: f"{_MOST_MEMORY / processes:.3f}"}


def _idle_cores(groups: Mapping[str, int]) -> int:
    """Return the number of cores that remain if each busy node uses one. The node that ends the program uses none."""
    ending = ending_group(groups)
    used = sum(count for name, count in groups.items() if name != ending and not traits_of(name).takes_idle_cores)
    return max(1, len(os.sched_getaffinity(0)) - used)


def find_accelerators(root: pathlib.Path = pathlib.Path("/")) -> list[str]:
    """Return the accelerators of this machine, whether or not JAX uses them. `root` is for tests."""
    infos = root.glob("proc/driver/nvidia/gpus/*/information")
    found = re.findall(r"Model:\s*(.+)", "\n".join(path.read_text() for path in infos))
    if not found and any(root.glob("dev/nvidia[0-9]*")):
        found = ["NVIDIA GPU"]
    found += ["AMD GPU"] if (root / "dev/kfd").exists() else []
    return found + (["TPU"] if any(root.glob("dev/accel[0-9]*")) else [])


def how_to_use(names: list[str]) -> str:
    """Return a sentence that says how JAX can use these accelerators, which it does not use now."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return "The environment variable JAX_PLATFORMS=cpu hides it: unset JAX_PLATFORMS"
    if names[0] == "TPU":
        return "pip install 'jax[tpu]'"
    if names[0] == "AMD GPU":
        return "Install JAX for ROCm: https://docs.jax.dev/en/latest/installation.html"
    if not _has_cuda():
        return "pip install 'rlframe[gpu]'"
    return "The CUDA plugin is installed, so check the driver with nvidia-smi, and the versions of jax."


def describe_devices(in_process: bool) -> tuple[list[str], str]:
    """Return the devices of a run, and a sentence about them.

    Args:
        in_process: True if the run uses JAX in this process. If False, do not start JAX here, because it would take
            memory of the accelerators: return the accelerators of this machine.
    """
    there = find_accelerators()
    if in_process:
        import jax

        names = [device.device_kind for device in jax.local_devices()]
        unused = jax.default_backend() == "cpu"
    else:
        hidden = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
        unused = hidden or (bool(there) and "TPU" not in there and not _has_cuda())
        names = ["cpu"] if unused or not there else there
    counted = [f"{count} x {name}" if count > 1 else name for name, count in collections.Counter(names).items()]
    text = f"Devices: {', '.join(counted)}."
    if there and unused:
        text += f" This machine has {', '.join(there)}, but JAX uses only the CPU. Fix: {how_to_use(there)}"
    return names, text


@contextlib.contextmanager
def matmul_precision(value: str, in_process: bool) -> Iterator[None]:
    """Set the precision of matrix products, for the processes of a run and, if `in_process`, for this one.

    Args:
        value: "default", "high" or "highest", as for `jax.default_matmul_precision`. "default" changes nothing.
        in_process: True if the run uses JAX in this process.
    """
    if value == "default":
        yield
        return
    with environment_variable(_PRECISION, value):
        if not in_process:
            yield
            return
        import jax

        before = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        jax.config.update(
            "jax_default_matmul_precision", value
        )  # JAX's context manager would set it in one thread only
        try:
            yield
        finally:
            jax.config.update("jax_default_matmul_precision", before)


def _has_cuda() -> bool:
    return any(map(extras.has, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
