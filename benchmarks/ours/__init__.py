"""rlframe's side of the comparisons: scripts that run in separate processes."""

from __future__ import annotations

import os


def simulate_devices(count: int) -> None:
    """Give JAX `count` devices on a CPU. Call it before JAX is used. Accelerators are not affected."""
    if count > 1:
        flag = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
