"""The devices of a run: the accelerators of this machine, their memory, and the precision of matrix products.

No function imports JAX unless the run uses JAX in this process, because JAX would take memory of the accelerators.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

from rlframe import extras
from rlframe.interprocess.processes import environment_variable

NO_ACCELERATOR = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # environment variables that hide accelerators
MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the share of an accelerator's memory that a process allocates
PRECISION = "JAX_DEFAULT_MATMUL_PRECISION"
_MOST_MEMORY = 0.9  # the shares of all processes of a run on an accelerator, together


def share_memory(processes: float) -> dict[str, str]:
    """Return the environment variables of `processes` processes that share an accelerator: each gets an equal share.

    One process uses JAX's default. Variables that the user has set are not changed.
    """
    if processes <= 1 or {MEMORY_SHARE, "XLA_PYTHON_CLIENT_PREALLOCATE"} & os.environ.keys():
        return {}
    return {MEMORY_SHARE: f"{_MOST_MEMORY / processes:.3f}"}


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
    with environment_variable(PRECISION, value):
        if not in_process:
            yield
            return
        import jax

        before = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        # JAX's context manager would set it in one thread only.
        jax.config.update("jax_default_matmul_precision", value)
        try:
            yield
        finally:
            jax.config.update("jax_default_matmul_precision", before)


def _has_cuda() -> bool:
    return any(map(extras.has, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
