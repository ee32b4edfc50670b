"""Tests of the files in deploy/: job scripts for Slurm, Kubernetes and Ray, and the Docker image."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil
import pytest

from rlframe import extras
from tests.extras import import_or_skip, needs
from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
ENDLESS = ["--agent", "dqn", "--env", "CartPole-v1", "--steps", "1000000000", "--num-envs", "2", "--min-replay-size"]
ENDLESS += ["100", "--log-every", "100", "--eval-episodes", "1", "--quiet"]


class Queue:
    """A simulated job queue, which starts jobs with a job script from deploy/. All runs are in one folder.

    Args:
        path: the folder of the runs.
        command: the job script, and its arguments before the options of the run.
        env: environment variables that the queue sets for its jobs.

    Attributes:
        env: environment variables of the started jobs.
    """

    def __init__(self, path: pathlib.Path, command: list[str], env: dict[str, str]) -> None:
        self.run_dir = path / "ppo-seed7"
        self.requeued = path / "requeued"
        self._commands = path / "bin"
        self._commands.mkdir()
        self.replace_rlframe(f'exec "{sys.executable}" -m rlframe "$@"')
        self.add("scontrol", f'echo "$@" >> "{self.requeued}"')
        self._command = command
        self.env = {**os.environ, **env, "RUNS": str(path), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.env["PATH"] = f"{self._commands}:{self.env['PATH']}"
        self._started: list[subprocess.Popen] = []

    def replace_rlframe(self, script: str) -> None:
        """Make the command `rlframe` run the given shell script."""
        self.add("rlframe", script)

    def add(self, name: str, script: str) -> None:
        """Add a fake command, which the jobs can call."""
        path = self._commands / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def has_nodes(self, count: int) -> None:
        """Simulate a job with `count` nodes. All nodes are this machine."""
        self.env |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": str(count), "SLURM_CPUS_PER_TASK": "2"}
        self.env["SLURMD_NODENAME"] = "node-1"
        self.add("python", f'exec "{sys.executable}" "$@"')
        self.add("srun", 'echo "$@" >> "$RUNS/srun"; while [[ $1 == --* ]]; do shift; done; exec "$@"')

    def start(self, *options: str) -> subprocess.Popen:
        command = [*self._command, *ENDLESS, *options]
        self._started.append(subprocess.Popen(command, env=self.env, start_new_session=True))
        return self._started[-1]

    def begins(self, *options: str) -> subprocess.Popen:
        """Start a job, and wait until its run has written a row about an update to metrics.jsonl."""
        process = self.start(*options)
        wait_until(lambda: self.updates() > 0)
        return process

    def updates(self) -> int:
        """Return the number of updates in the newest row of metrics.jsonl, or 0 if there is no row."""
        metrics = self.run_dir / "metrics.jsonl"
        rows = (
            [line for line in metrics.read_text().splitlines(True) if line.endswith("\n")] if metrics.exists() else []
        )
        return json.loads(rows[-1]).get("learner_steps", 0) if rows else 0

    def saved(self) -> list[int]:
        """Return the step numbers of the saved checkpoints."""
        return sorted(int(each.name) for each in (self.run_dir / "checkpoints").glob("*") if each.name.isdigit())

    def close(self) -> None:
        """Kill the processes that are still running."""
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
    """Return a queue that restarts killed jobs with the same command."""
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
    """Return the Job of deploy/kubernetes/job.yaml."""
    yaml = pytest.importorskip("yaml")
    _, found = yaml.safe_load_all((DEPLOY / "kubernetes/job.yaml").read_text())
    return found


@pytest.mark.system
def test_slurm_run_is_requeued_at_its_time_limit_and_resumes(slurm):
    process = slurm.begins()
    for _ in range(2):  # After the second signal, the run must still save.
        os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(120.0) == 128 + signal.SIGTERM
    assert slurm.requeued.read_text() == "requeue 41_7\n"
    before = slurm.saved()[-1]
    assert before > 0
    again = slurm.start("--stop-at", str(before + 500))
    assert again.wait(240.0) == 0
    assert json.loads((slurm.run_dir / "result.json").read_text())["env_steps"] >= before + 500
    # The job is requeued only once.
    assert slurm.saved()[-1] > before and slurm.requeued.read_text() == "requeue 41_7\n"


@pytest.mark.system
def test_run_cancelled_by_slurm_saves_and_is_not_requeued(slurm):
    process = slurm.begins()
    os.killpg(process.pid, signal.SIGTERM)  # as `scancel` does, send SIGTERM to all processes of the job
    assert process.wait(120.0) == 128 + signal.SIGTERM
    assert slurm.saved()[-1] > 0 and not slurm.requeued.exists()


@pytest.mark.parametrize("code, requeued", [(0, False), (1, True), (2, False)])
def test_slurm_script_requeues_the_job_only_after_exit_code_1(slurm, code, requeued):
    slurm.replace_rlframe(f"trap 'exit {code}' TERM; touch $RUNS/began; while :; do sleep 0.05; done")
    process = slurm.start()
    wait_until((slurm.run_dir.parent / "began").exists)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(120.0) == code and slurm.requeued.exists() == requeued


def test_slurm_script_saves_and_requeues_a_run_that_starts_after_the_signal(slurm):
    slurm.has_nodes(2)
    slurm.add("python", "echo 127.0.0.1")
    answers = 'touch "$RUNS/asked"; test -e "$RUNS/ready" && printf " 1 node_a\\n 1 node_b\\n"'
    slurm.add("ray", f"case $1 in start) exec sleep 60;; status) {answers};; esac")
    slurm.replace_rlframe("exec sleep 60")
    process = slurm.start()
    wait_until((slurm.run_dir.parent / "asked").exists)
    os.kill(process.pid, signal.SIGUSR1)
    (slurm.run_dir.parent / "ready").touch()
    assert process.wait(30.0) == 128 + signal.SIGTERM and slurm.requeued.exists()


def test_slurm_script_starts_and_stops_ray_for_several_nodes(slurm):
    needs("ray")
    slurm.has_nodes(3)
    runs = slurm.run_dir.parent
    starts = 'echo $$ >> "$RUNS/rays"; echo "$* ${#RAY_AUTH_TOKEN}" >> "$RUNS/starts"; exec sleep 60'
    answers = 'test $(cat "$RUNS/rays" | wc -l) = 2 && printf " 1 node_a\\n 1 node_b\\n 1 node_c\\n"'
    slurm.add("ray", f"case $1 in start) {starts};; status) {answers};; esac")
    slurm.replace_rlframe('echo "$@" > "$RUNS/given"; exit 3')
    assert slurm.start().wait(60.0) == 3
    head, others = sorted((runs / "starts").read_text().splitlines(), key=lambda line: "--head" not in line)
    given = (runs / "given").read_text().split()
    assert given[:4] == ["train", "--engine", "ray", "--ray-address"] and given[5 : 5 + len(ENDLESS)] == ENDLESS
    ip, port = given[4].split(":")
    assert f"--node-ip-address={ip} --port={port} " in head and f"--address={given[4]} " in others
    assert head.endswith(" 64") and others.endswith(" 64")  # The token has 64 hexadecimal digits.
    assert (runs / "srun").read_text().startswith("--nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --exclude=node-1 ")
    for pid in (runs / "rays").read_text().split():
        assert not pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.system
def test_slurm_run_on_several_nodes_trains_and_stops_ray(slurm):
    needs("ray")
    slurm.has_nodes(2)
    slurm.add("ray", f'exec "{sys.executable}" -m ray.scripts.scripts "$@"')
    slurm.replace_rlframe(f'echo "$5" > "$RUNS/address"; exec "{sys.executable}" -m rlframe "$@"')
    # a short path, because a socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="ray-") as files:
        slurm.env["RAY_TMPDIR"] = files
        process = slurm.start("--topology", "distributed", "--num-actors", "2", "--stop-at", "500")
        assert process.wait(400.0) == 0
    assert json.loads((slurm.run_dir / "result.json").read_text())["env_steps"] >= 500
    address = (slurm.run_dir.parent / "address").read_text().strip()
    assert not any(address in " ".join(cmdline(each)) for each in psutil.process_iter())


def cmdline(process: psutil.Process) -> list[str]:
    """Return the command line of a process. Return [] if the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.system
def test_run_killed_before_its_first_checkpoint_restarts(replacing):
    process = replacing.start()
    wait_until((replacing.run_dir / "config.json").exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = replacing.start("--stop-at", "500")
    assert again.wait(240.0) == 0
    result = json.loads((replacing.run_dir / "result.json").read_text())
    assert result["env_steps"] >= 500
    assert json.loads((replacing.run_dir / "config.json").read_text())["experiment"]["seed"] == 7


def test_kubernetes_job_is_valid():
    kubernetes = import_or_skip("kubernetes", "pip install 'rlframe[test]'")
    import yaml

    client = kubernetes.client.ApiClient()
    claim, found = documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/job.yaml").read_text()))
    for document in documents:
        parsed = getattr(kubernetes.client, f"V1{document['kind']}").from_dict(document)
        assert client.sanitize_for_serialization(parsed) == document  # The client has dropped no unknown field.
    spec, pod = found["spec"], found["spec"]["template"]["spec"]
    # Kubernetes requires these values for indexed Jobs.
    assert spec["completionMode"] == "Indexed" and spec["maxFailedIndexes"] <= spec["completions"]
    assert pod["restartPolicy"] == "Never" and spec["podReplacementPolicy"] == "Failed"
    (container,) = pod["containers"]
    on_exit_codes = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert [each["containerName"] for each in on_exit_codes] == [container["name"]]
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (runs,) = [each["value"] for each in container["env"] if each["name"] == "RUNS"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [runs]


def test_runtime_environment_file_is_accepted_by_ray():
    pytest.importorskip("ray")
    import yaml
    from ray.runtime_env import RuntimeEnv

    given = yaml.safe_load((DEPLOY / "ray/runtime-env.yaml").read_text())
    assert RuntimeEnv(**given).env_vars() == given["env_vars"]  # RuntimeEnv checks the types and names.


def test_ray_job_is_valid_for_kuberay():
    kubernetes = import_or_skip("kubernetes", "pip install 'rlframe[test]'")
    jsonschema = import_or_skip("jsonschema", "pip install 'rlframe[test]'")
    import yaml

    schema = yaml.safe_load((ROOT / "tests/rayjob-schema.yaml").read_text())
    claim, found = yaml.safe_load_all((DEPLOY / "kubernetes/rayjob.yaml").read_text())
    spec, cluster = found["spec"], found["spec"]["rayClusterSpec"]
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    jsonschema.validate(spec, schema)
    client = kubernetes.client.ApiClient()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        parsed = kubernetes.client.V1PodTemplateSpec.from_dict(template)
        assert client.sanitize_for_serialization(parsed) == template  # The client has dropped no unknown field.
        (volume,) = template["spec"]["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (container,) = template["spec"]["containers"]
        runs = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RUNS"]
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == [runs]
    # The Ray version must be the version in the Docker image. `rlframe train` must have all options of the command.
    for name in ("py310", "modern"):
        assert f"ray=={cluster['rayVersion']}" in (ROOT / f"constraints/{name}.txt").read_text().split()
    shell, script, _, seed, *options = spec["entrypoint"].split()
    assert (shell, pathlib.Path(script).name, seed) == ("bash", "train.sh", "1")
    arguments = options_of(options)
    assert (arguments["--engine"], arguments["--ray-address"]) == ("ray", "auto")
    wrong = {**spec, "rayClusterSpec": {**cluster, "headGroup": {}}}
    with pytest.raises(jsonschema.ValidationError, match="'headGroup' was unexpected"):
        jsonschema.validate(wrong, schema)


def options_of(arguments: list[str]) -> dict[str, str]:
    """Parse options, each with one value. Check that inventory.txt contains these options."""
    found = dict(zip(arguments[::2], arguments[1::2], strict=True))
    known = (ROOT / "tests/inventory.txt").read_text()
    assert [option for option in found if option not in known] == []
    return found


def test_docker_image_contains_its_scripts_and_has_no_root_user():
    dockerfile_parse = import_or_skip("dockerfile_parse", "pip install 'rlframe[test]'")
    with (DEPLOY / "Dockerfile").open("rb") as file:
        parsed = dockerfile_parse.DockerfileParser(fileobj=file).structure
    steps = [(each["instruction"], each["value"]) for each in parsed if each["instruction"] != "COMMENT"]
    assert {name for name, _ in steps} <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "CMD"}
    defaults = dict(value.split("=") for name, value in steps if name == "ARG")
    assert [value for name, value in steps if name == "FROM"] == ["python:${PYTHON}-slim"]
    assert defaults["PYTHON"] == "3.12" and (ROOT / f"constraints/{defaults['CONSTRAINTS']}.txt").exists()
    assert set(defaults["EXTRAS"].split(",")) <= set(extras.MODULES)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    workdir, copied = "", {}
    for name, value in steps:
        if name == "WORKDIR":
            workdir = value
        elif name == "COPY":
            *sources, target = value.split()
            for source in sources:
                assert (ROOT / source).exists() and f"!{source}" in ignored
                copied[f"{workdir}/{target}"] = source
        elif name == "RUN":
            subprocess.run(["sh", "-n", "-c", value], check=True)
    entrypoint = (DEPLOY / "kubernetes/rayjob.yaml").read_text().partition("entrypoint: >-")[2].split()
    assert copied[entrypoint[1]] == "deploy/ray/train.sh"
    users = [value for name, value in steps if name == "USER"]
    assert users and users[-1].isdigit() and users[-1] != "0"
