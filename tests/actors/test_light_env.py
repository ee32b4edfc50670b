"""Launchpad nodes of light_env: a learner, an inference service, and actors with and without the service."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.extras import needs

needs("launchpad")

DEADLINE = 240.0  # maximum seconds of the test, on a busy machine


@pytest.mark.system
def test_light_env_nodes_train_and_stop_cleanly():
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.light_env"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output
    assert not re.search(r"\w+Error: |Traceback", output), output
    reports = [json.loads(found) for found in re.findall(r"\{\"[^{}]*\}", output)]
    (learner,) = [report for report in reports if "learner_steps" in report]
    (service,) = [report for report in reports if "compilations" in report]
    actors = [report for report in reports if "env_steps" in report]
    assert learner["learner_steps"] >= 150 and learner["ranks"] == [0, 1, 2], output
    assert learner["newest_version_acted"] > 0 and service["params_version"] > 0
    assert sorted(actor["rank"] for actor in actors) == [0, 1, 2] and all(actor["env_steps"] > 0 for actor in actors), (
        output
    )
    assert service["calls"] <= service["requests"] and service["compilations"] <= 6
