"""Run `checks.py` in a process with 8 simulated devices, because a process chooses its devices only once."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from rlframe.errors import UsageError
from rlframe.sharding import LearnerDevices

CHECKS = pathlib.Path(__file__).with_name("checks.py")


@pytest.mark.timeout(1900)  # more than the process may take
@pytest.mark.parametrize("marker", ["not system", pytest.param("system", marks=pytest.mark.system)])
def test_several_devices_compute_the_same_as_one(marker):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(CHECKS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-2_000:]


def test_more_devices_than_the_process_has_are_refused():
    message = r"The learner \(.*\) needs device 63 \(the first one is 0\), but this process has 1 cpu device\. Choose"
    with pytest.raises(UsageError, match=message):
        LearnerDevices(64)


@pytest.mark.parametrize("devices", [0, (), (-1,), (0, 0)])
def test_no_devices_and_repeated_devices_are_refused(devices):
    with pytest.raises(UsageError, match=re.escape(f"at least one device, and each id only once, got {devices!r}.")):
        LearnerDevices(devices)
