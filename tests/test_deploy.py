"""Queues of runs: the files of deploy/ for Slurm, Kubernetes and Ray."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.extras import needs
from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
ENDLESS = ["--agent", "dqn", "--env", "CartPole-v1", "--steps", "1000000000", "--num-envs", "2", "--min-replay-size"]
ENDLESS += ["100", "--log-every", "100", "--eval-episodes", "1", "--quiet"]


class Queue:
    """Runs the body of a queue's script as the queue would, on a folder of runs.

    Args:
        path: of the folder.
        command: the script, with what comes before the run's options.
        env: what the queue sets.
    """

    def __init__(self, path: pathlib.Path, command: list[str], env: dict[str, str]) -> None:
        self.run_dir = path / "ppo-seed7"
        self.requeued = path / "requeued"
        self._commands = path / "bin"
        self._commands.mkdir()
        self.replace_rlframe(f'exec "{sys.executable}" -m rlframe "$@"')
        self._add("scontrol", f'echo "$@" >> "{self.requeued}"')
        self._command = command
        self._env = {**os.environ, **env, "RUNS": str(path), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self._env["PATH"] = f"{self._commands}:{self._env['PATH']}"
        self._started: list[subprocess.Popen] = []

    def replace_rlframe(self, script: str) -> None:
        """Has the command `rlframe` be this."""
        self._add("rlframe", script)

    def _add(self, name: str, script: str) -> None:
        path = self._commands / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def start(self, *options: str) -> subprocess.Popen:
        command = [*self._command, *ENDLESS, *options]
        self._started.append(subprocess.Popen(command, env=self._env, start_new_session=True))
        return self._started[-1]

    def begins(self, *options: str) -> subprocess.Popen:
        """Starts one, and waits until its run has written a row."""
        process = self.start(*options)
        wait_until(lambda: self.steps() > 0)
        return process

    def steps(self) -> int:
        """Environment steps of the newest row."""
        metrics = self.run_dir / "metrics.jsonl"
        rows = (
            [line for line in metrics.read_text().splitlines(True) if line.endswith("\n")] if metrics.exists() else []
        )
        return json.loads(rows[-1])["step"] if rows else 0

    def saved(self) -> list[int]:
        """The steps of the checkpoints that there are."""
        return sorted(int(each.name) for each in (self.run_dir / "checkpoints").glob("*") if each.name.isdigit())

    def close(self) -> None:
        """Leaves no process behind, whatever a test found."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def slurm(tmp_path: pathlib.Path) -> Iterator[Queue]:
    env = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "41", "SLURM_JOB_NAME": "ppo"}
    queue = Queue(tmp_path, ["bash", str(DEPLOY / "slurm/train.sbatch")], env)
    yield queue
    queue.close()


@pytest.fixture(params=["kubernetes", "ray"])
def replacing(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Queue]:
    """A queue that starts the same command again."""
    if request.param == "ray":
        command, env = ["bash", str(DEPLOY / "ray/train.sh"), "ppo", "7"], {}
    else:
        (container,) = job()["spec"]["template"]["spec"]["containers"]
        script, name, *_ = container["args"]
        command = [*container["command"], script, name]
        env = {each["name"]: each["value"] for each in container["env"]} | {"JOB_COMPLETION_INDEX": "7"}
    queue = Queue(tmp_path, command, env)
    yield queue
    queue.close()


def job() -> dict:
    """The Job of deploy/kubernetes."""
    yaml = pytest.importorskip("yaml")
    _, found = yaml.safe_load_all((DEPLOY / "kubernetes/job.yaml").read_text())
    return found


@pytest.mark.system
def test_slurm_queues_a_run_again_whose_time_is_up_and_it_goes_on(slurm):
    process = slurm.begins()
    for _ in range(2):  # the second one must not end it unsaved
        os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(120.0) == 128 + signal.SIGTERM
    assert slurm.requeued.read_text() == "requeue 41_7\n"
    before = slurm.saved()[-1]
    assert before > 0
    again = slurm.start("--stop-at", str(before + 500))
    assert again.wait(240.0) == 0
    assert json.loads((slurm.run_dir / "result.json").read_text())["env_steps"] >= before + 500
    assert slurm.saved()[-1] > before and slurm.requeued.read_text() == "requeue 41_7\n"  # it is done


@pytest.mark.system
def test_a_run_that_slurm_cancels_saves_and_is_not_queued_again(slurm):
    process = slurm.begins()
    os.killpg(process.pid, signal.SIGTERM)  # `scancel` sends it to all processes of the job
    assert process.wait(120.0) == 128 + signal.SIGTERM
    assert slurm.saved()[-1] > 0 and not slurm.requeued.exists()


@pytest.mark.parametrize("code, requeued", [(0, False), (1, True), (2, False)])
def test_slurm_queues_a_run_again_unless_it_was_done_or_its_options_are_wrong(slurm, code, requeued):
    slurm.replace_rlframe(f"trap 'exit {code}' TERM; touch $RUNS/began; while :; do sleep 0.05; done")
    process = slurm.start()
    wait_until((slurm.run_dir.parent / "began").exists)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(120.0) == code and slurm.requeued.exists() == requeued


@pytest.mark.system
def test_a_run_that_was_killed_before_it_had_saved_begins_again(replacing):
    process = replacing.start()
    wait_until((replacing.run_dir / "config.json").exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = replacing.start("--stop-at", "500")
    assert again.wait(240.0) == 0
    result = json.loads((replacing.run_dir / "result.json").read_text())
    assert result["env_steps"] >= 500
    assert json.loads((replacing.run_dir / "config.json").read_text())["experiment"]["seed"] == 7


def test_the_job_is_one_that_kubernetes_takes():
    needs("kubernetes")
    import kubernetes
    import yaml

    client = kubernetes.client.ApiClient()
    claim, found = documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/job.yaml").read_text()))
    for document in documents:
        parsed = getattr(kubernetes.client, f"V1{document['kind']}").from_dict(document)
        assert client.sanitize_for_serialization(parsed) == document  # every field is known
    spec, pod = found["spec"], found["spec"]["template"]["spec"]
    # What the API server demands of such Jobs.
    assert spec["completionMode"] == "Indexed" and spec["maxFailedIndexes"] <= spec["completions"]
    assert pod["restartPolicy"] == "Never" and spec["podReplacementPolicy"] == "Failed"
    (container,) = pod["containers"]
    on_exit_codes = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert [each["containerName"] for each in on_exit_codes] == [container["name"]]
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (runs,) = [each["value"] for each in container["env"] if each["name"] == "RUNS"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [runs]


def test_the_environment_of_a_ray_job_is_one_that_ray_takes():
    pytest.importorskip("ray")
    import yaml
    from ray.runtime_env import RuntimeEnv

    given = yaml.safe_load((DEPLOY / "ray/runtime-env.yaml").read_text())
    assert RuntimeEnv(**given).env_vars() == given["env_vars"]  # it checks types and names
