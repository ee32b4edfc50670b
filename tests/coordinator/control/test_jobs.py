"""The queue of `rlframe serve coordinator`: its own logic, over a process that stands for a run (`job_script`).

`train_command` is all that is replaced here; the end-to-end test, with the real one, belongs beside this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.extras import needs
from tests.waiting import wait_until

needs("trajectories")

from rlframe.cli import main
from rlframe.coordinator.control.address import queue_file
from rlframe.coordinator.control.app import make_app
from rlframe.coordinator.control.client import ControlClient
from rlframe.coordinator.control.errors import ConflictError, FieldError
from rlframe.coordinator.control.job_target import JobTarget
from rlframe.coordinator.control.jobs import Job, JobQueue, train_command
from rlframe.coordinator.control.jobs_endpoints import jobs_router
from rlframe.coordinator.control.serving import ControlServer
from rlframe.coordinator.control.submission import read_submission
from rlframe.coordinator.states import JobState
from rlframe.errors import UsageError
from rlframe.interprocess.processes import ProcessId
from rlframe.programs.experiment import load_experiment

SCRIPT = pathlib.Path(__file__).with_name("job_script.py")
ROOT = pathlib.Path(__file__).parents[3]
DEADLINE = 60.0  # seconds for a process to start or end, on a machine that is busy
SPEC = {"agent": "dqn", "env": "CartPole-v1", "steps": 5000, "max_actors": 4}


def script_command(job: Job, config: pathlib.Path, resume: bool) -> list[str]:
    """In place of `train_command`."""
    return [sys.executable, str(SCRIPT), job.run_dir, *(["--resume"] if resume else [])]


@pytest.fixture
def runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The folder of a queue; whatever it ran is ended."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "runs"
    yield folder
    with contextlib.suppress(FileNotFoundError):
        for job in json.loads((folder / "jobs.json").read_text())["jobs"]:
            if ProcessId(job["pid"], job["started"]).is_alive:
                os.killpg(job["pid"], signal.SIGKILL)


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[tuple[JobQueue, httpx.Client]]:
    """The service: a queue and what is served of it."""
    queue = JobQueue(folder, script_command)
    queue.start()
    app = make_app(JobTarget(queue), routers=[jobs_router(queue)])
    try:
        with ControlServer(app, port=0) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as client:
            yield queue, client
    finally:
        queue.close()


def submit(client: httpx.Client) -> str:
    response = client.post("/submit", json=SPEC)
    assert response.status_code == 200, response.text
    return response.json()["result"]["id"]


def state_of(client: httpx.Client, job: str) -> str:
    return client.get(f"/jobs/{job}").json()["state"]


def job_state(client: httpx.Client) -> str | None:
    """As /status has it of the job that runs."""
    return (client.get("/status").json().get("job") or {}).get("state")


def sessions(folder: pathlib.Path, job: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return (folder / job / "sessions").read_text().splitlines()
    return []


@pytest.mark.system
def test_jobs_run_one_after_the_other_and_the_control_is_of_the_one_that_runs(runs):
    with running(runs) as (_, client):
        status = client.get("/status").json()
        assert status == {"job": None, "jobs": []}
        assert client.post("/pause").status_code == 409
        first, failing, last = submit(client), submit(client), submit(client)
        assert (first, failing, last) == ("job-0001", "job-0002", "job-0003")
        wait_until(lambda: job_state(client) == "RUNNING")
        assert [state_of(client, job) for job in (first, failing, last)] == ["running", "queued", "queued"]
        assert client.post("/scale", json={"role": "collector", "n": 4}).status_code == 200
        assert client.get("/status").json()["wanted"]["collector"] == 4
        assert client.post("/scale", json={"role": "collector", "n": 40}).json()["error"]["field"] == "n"
        events = wait_until(lambda: client.get("/events").json()["events"])
        assert events[0]["number"] == 1_000_000_001 and events[0]["job"] == first
        assert client.post("/stop", json={"reason": "enough"}).status_code == 200
        wait_until(lambda: state_of(client, last) == "running")
        assert state_of(client, first) == "cancelled"
        failed = client.get(f"/jobs/{failing}").json()
        assert (failed["state"], failed["reason"]) == ("failed", "The environment raised.")
        assert failed["sessions"] == 1  # its end was its own
        later = wait_until(lambda: client.get("/events", params={"since": events[-1]["number"]}).json()["events"])
        assert later[0]["number"] == 3_000_000_001  # numbers rise, whichever job they are of


def test_a_queued_job_can_be_cancelled_and_one_that_is_over_cannot(runs):
    with running(runs) as (queue, client):
        first, second = submit(client), submit(client)
        assert client.post(f"/jobs/{second}/cancel", json={"reason": "no"}).json()["result"]["state"] == "cancelled"
        assert client.post(f"/jobs/{second}/cancel").status_code == 409
        assert client.post("/jobs/job-0009/cancel").status_code == 404
        assert client.get("/jobs/job-0009").json()["error"]["type"] == "not_found"
        wait_until(lambda: job_state(client) == "RUNNING")
        assert client.post(f"/jobs/{first}/cancel").status_code == 200
        wait_until(lambda: state_of(client, first) == "cancelled")
        assert queue.running() is None and sessions(runs, second) == []


def test_a_run_that_does_not_stop_gets_one_sigterm_as_a_second_would_end_it_unsaved(runs, monkeypatch):
    monkeypatch.setattr("rlframe.coordinator.control.jobs._DRAIN", 0.0)
    queue = JobQueue(runs)  # not started: it looks when it is told to
    with contextlib.closing(queue), subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        sent = []
        monkeypatch.setattr("rlframe.coordinator.control.jobs.os.kill", lambda pid, number: sent.append((pid, number)))
        monkeypatch.setattr(queue, "_child", process)
        job = Job(1, {"agent": "dqn", "env": "x"}, "", "stopping", pid=process.pid, told_at=time.time() - 1.0)
        queue._jobs.append(job)
        for _ in range(3):
            queue._step()
        assert sent == [(process.pid, signal.SIGTERM)]
        job.told_at = time.time() - 1000.0
        queue._step()
        assert process.wait(DEADLINE) == -signal.SIGKILL


@pytest.mark.system
def test_a_run_that_died_is_started_again_from_its_checkpoint(runs):
    with running(runs) as (queue, client):
        job = submit(client)
        wait_until(lambda: job_state(client) == "RUNNING")
        os.killpg(queue.running().pid, signal.SIGKILL)
        wait_until(lambda: sessions(runs, job) == ["", "--resume"])
        wait_until(lambda: job_state(client) == "RUNNING")
        assert client.get(f"/jobs/{job}").json()["sessions"] == 2


@pytest.mark.system
def test_a_service_that_is_started_again_adopts_the_run_that_goes_on(runs):
    with running(runs) as (queue, client):
        job = submit(client)
        waiting = submit(client)
        wait_until(lambda: job_state(client) == "RUNNING")
        pid = queue.running().pid
    assert ProcessId.of(pid).is_alive
    with running(runs) as (queue, client):
        assert queue.running().pid == pid
        assert job_state(client) == "RUNNING"
        assert sessions(runs, job) == [""] and state_of(client, waiting) == "queued"
        os.kill(pid, signal.SIGKILL)  # no child of this queue's
        wait_until(lambda: sessions(runs, job) == ["", "--resume"])


@pytest.mark.system
def test_a_service_that_is_started_again_resumes_the_run_that_died_meanwhile(runs):
    with running(runs) as (queue, client):
        job = submit(client)
        wait_until(lambda: job_state(client) == "RUNNING")
        process = queue.running()
    os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not ProcessId(process.pid, process.started).is_alive)
    with running(runs) as (_, client):
        wait_until(lambda: sessions(runs, job) == ["", "--resume"])
        wait_until(lambda: job_state(client) == "RUNNING")


def adopted(runs: pathlib.Path) -> tuple[JobQueue, Job]:
    """A queue that is not started, and a job of it whose process ended meanwhile: its exit code is unknown."""
    queue = JobQueue(runs, script_command)
    run_dir = runs / "job-0001"
    (run_dir / "coordinator").mkdir(parents=True)
    job = Job(1, {"agent": "dqn", "env": "x"}, str(run_dir), "running", sessions=1, pid=2**30)
    queue._jobs.append(job)
    return queue, job


def write_status(job: Job, state: JobState, reason: str) -> None:
    path = pathlib.Path(job.run_dir) / "coordinator" / "status.json"
    path.write_text(json.dumps({"job": {"state": state.value, "reason": reason}}))


def test_an_adopted_run_that_failed_by_itself_is_failed_and_not_run_again(runs):
    queue, job = adopted(runs)
    with contextlib.closing(queue):
        write_status(job, JobState.FAILED, "learner/0 failed: NonFiniteLossError: The loss is nan.")
        queue._step()
        assert (job.state, job.sessions) == ("failed", 1)
        assert job.reason == "learner/0 failed: NonFiniteLossError: The loss is nan."


def test_an_adopted_run_that_has_a_result_is_done_unless_a_signal_ended_it(runs):
    queue, job = adopted(runs)
    with contextlib.closing(queue):
        write_status(job, JobState.CLOSED, "100,000 environment steps")
        result = pathlib.Path(job.run_dir) / "result.json"
        result.write_text('{"env_steps": 50000, "signal": 15}')
        queue._step()
        assert (job.state, job.sessions) == ("running", 2)
        wait_until(lambda: sessions(runs, job.id))
        os.killpg(job.pid, signal.SIGKILL)
        assert queue._child is not None
        queue._child.wait(DEADLINE)
        queue._child = None  # as a later service would have it
        result.write_text('{"env_steps": 100000, "signal": null}')
        queue._step()
        assert (job.state, job.sessions) == ("done", 2)


def test_what_the_session_before_has_left_says_nothing_of_the_next_one(runs):
    queue, job = adopted(runs)
    with contextlib.closing(queue):
        run_dir = pathlib.Path(job.run_dir)
        (run_dir / "config.json").write_text("{}")
        write_status(job, JobState.CLOSED, "the program was told to stop")
        left = [run_dir / "coordinator" / "status.json", run_dir / "result.json"]
        left[1].write_text('{"signal": 15}')
        queue._step()
        assert job.sessions == 2 and not any(path.exists() for path in left)


def test_one_service_has_a_folder(runs):
    queue = JobQueue(runs)
    with pytest.raises(UsageError, match="Another `rlframe serve coordinator` has the jobs"):
        JobQueue(runs)
    queue.close()
    JobQueue(runs).close()


def test_a_damaged_queue_is_said_to_be(runs):
    JobQueue(runs).close()
    (runs / "jobs.json").write_text('{"jobs": [{"number": 1}]}')
    with pytest.raises(UsageError, match="is no queue of jobs"):
        JobQueue(runs)
    (runs / "jobs.json").unlink()
    JobQueue(runs).close()  # the one that failed holds nothing


def test_what_is_submitted_becomes_the_runs_config(tmp_path):
    submitted = read_submission({**SPEC, "seed": 3, "learning_rate": 0.25, "min_actors": 2})
    assert submitted.what == {"agent": "dqn", "env": "CartPole-v1"}
    (tmp_path / "config.json").write_text(submitted.config)
    described = load_experiment(tmp_path)
    assert (described.agent, described.steps, described.seed) == ("dqn", 5000, 3)
    assert (described.topology, described.min_actors, described.max_actors) == ("elastic", 2, 4)
    assert described.agent_config.learning_rate == 0.25


@pytest.mark.parametrize(
    "spec, field, message",
    [
        ({"agent": "dqm"}, "agent", "dqm"),
        ({"agent": 3}, "agent", "agent must be a name, got 3."),
        ({"step": 5}, "step", "Did you mean 'steps'?"),
        ({"steps": "many"}, "steps", "steps: expected int, got 'many'."),
        ({"steps": True}, "steps", "expected int"),
        ({"steps": 0}, "steps", "steps must be at least 1, got 0."),
        ({"learning_rate": [1]}, "learning_rate", "expected float"),
        ({"preset": "nothing"}, "preset", "nothing"),
        ({"min_actors": 0}, "min_actors", "min_actors must be at least 1, got 0."),
        ({"max_actors": 2.5}, "max_actors", "expected int, got 2.5"),
        ({"min_actors": 5, "max_actors": 4}, "max_actors", "max_actors must be at least min_actors, got 4 and 5."),
        ({"topology": "single_process"}, "topology", "has the topology elastic, not single_process"),
        ({"agent_config": {}}, "agent_config", "There is no field 'agent_config'"),
        ({"network_config": {"hidden": 1}, "network": "mlp"}, "network_config", "hidden"),
    ],
)
def test_what_cannot_be_is_refused_and_the_field_named(spec, field, message):
    with pytest.raises(FieldError) as refused:
        read_submission({"agent": "dqn", **spec})
    assert refused.value.field == field
    assert message in str(refused.value)


def test_a_refused_submission_is_422_and_queues_nothing(runs):
    with running(runs) as (queue, client):
        error = client.post("/submit", json={"agent": "dqn", "steps": -1}).json()["error"]
        assert (error["type"], error["field"]) == ("invalid", "steps")
        assert queue.jobs() == []


def test_the_command_of_a_run():
    job = Job(1, {"agent": "dqn", "env": "CartPole-v1"}, "/runs/job-0001")
    command = " ".join(train_command(job, pathlib.Path("c.json"), False)[1:])
    assert command == ("-m rlframe train --config c.json --http 0 --run-dir /runs/job-0001 --quiet --json")
    resumed = train_command(job, pathlib.Path("c.json"), True)
    assert "--resume" in resumed and "--config" not in resumed


def test_no_more_jobs_wait_than_may(runs, monkeypatch):
    monkeypatch.setattr("rlframe.coordinator.control.jobs.MAX_QUEUED", 2)
    queue = JobQueue(runs)  # not started: they stay queued
    with contextlib.closing(queue):
        for _ in range(2):
            queue.submit({"agent": "dqn", "env": "x"}, "{}")
        with pytest.raises(ConflictError, match="2 jobs wait already"):
            queue.submit({"agent": "dqn", "env": "x"}, "{}")


@pytest.mark.system
def test_the_command_serves_until_it_is_told_to_end(runs, capsys):
    needs("launchpad")
    command = [sys.executable, "-m", "rlframe", "serve", "coordinator", "--port", "0", "--runs", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            greeting = process.stdout.readline()
            url = greeting.split()[2]
            assert httpx.get(url + "/healthz", timeout=DEADLINE).status_code == 200
            # Whoever else has an account here has no part in it.
            assert httpx.get(url + "/jobs", timeout=DEADLINE).status_code == 401
            assert httpx.post(url + "/submit", json=SPEC, timeout=DEADLINE).status_code == 401
            assert (runs / "token").stat().st_mode & 0o777 == 0o600
            assert (runs / "token").read_text().strip() not in greeting  # it is no terminal
            assert main(["status", "--runs", str(runs), "--json"]) == 0
            assert json.loads(capsys.readouterr().out) == {"job": None, "jobs": []}
            with ControlClient.of_queue(runs) as client:
                assert client.get("/jobs") == {"jobs": []}
            process.terminate()
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
    assert (runs / "jobs.lock").exists() and not queue_file(runs).exists()


@pytest.mark.system
def test_a_terminal_gets_a_link_with_the_token(runs):
    needs("launchpad")
    command = [sys.executable, "-m", "rlframe", "serve", "coordinator", "--port", "0", "--runs", str(runs)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs) as process:
        os.close(theirs)
        try:
            with open(ours, errors="replace") as terminal:
                greeting = terminal.readline()
        finally:
            process.kill()
    assert f"/#token={(runs / 'token').read_text().strip()} " in greeting


def test_the_service_needs_a_token_where_others_reach_it(runs, capsys):
    needs("launchpad")
    assert main(["serve", "coordinator", "--host", "0.0.0.0", "--port", "0", "--runs", str(runs)]) == 2
    assert "Give it a --token-file, or listen at 127.0.0.1." in capsys.readouterr().err
    assert not runs.exists()
