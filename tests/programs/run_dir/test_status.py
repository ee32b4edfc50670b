"""`rlframe status` and `rlframe stop` accept a run directory. They use its files and its process."""

from __future__ import annotations

import json
import signal

import pytest

from rlframe.cli import main
from rlframe.engines.base import NodeStatus
from rlframe.errors import ProgramError
from rlframe.programs import make_experiment, run_experiment
from rlframe.programs.run_dir.directory import Result, RunDir
from rlframe.programs.run_dir.lock import RunLock, holder_of
from rlframe.programs.run_dir.status import StatusFile, StatusReader, describe_start
from tests.programs.running_program import RunningProgram

DESCRIBED = make_experiment("dqn", steps=1_000)
ROW = {"episode_return": 20.0, "steps_per_second": 100.0, "staleness": 1.0, "learner_steps": 9, "params_version": 10}


@pytest.fixture
def directory(tmp_path):
    directory = RunDir(tmp_path / "run")
    directory.create()
    directory.write_config(DESCRIBED, {})
    return directory


def job(directory):
    return StatusReader(directory.path)()["job"]


def append(directory, **row):
    with directory.metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_status_shows_the_progress_of_a_run(directory):
    with RunLock(directory.path):
        status = StatusFile(directory, DESCRIBED, 1_000)
        look = StatusReader(directory.path)
        assert (look()["job"]["state"], look()["job"]["env_steps"]) == ("INIT", 0)
        append(directory, step=200, **ROW)
        append(directory, step=400, **ROW)
        append(directory, step=400, return_mean=30.0)
        found = look()
        assert (found["job"]["state"], found["job"]["env_steps"], found["job"]["until"]) == ("RUNNING", 400, 1_000)
        assert (found["job"]["learner_steps"], found["job"]["params_version"]) == (9, 10)
        assert (found["returns"], found["evaluations"]) == ([[200, 20.0], [400, 20.0]], [[400, 30.0]])
        directory.metrics.write_text("")  # a resumed session removes later rows
        append(directory, step=100, **ROW)
        assert look()["returns"] == [[100, 20.0]]
        status.watch(True, [])
        assert look()["job"]["state"] == "DRAINING"


def test_start_of_a_program_is_described_by_the_phases_of_its_nodes():
    learner = NodeStatus("learner", phase="compiling")
    actors = [NodeStatus(f"actor/{i}", phase="starting") for i in (0, 1)]
    assert describe_start([learner, *actors, NodeStatus("monitor", phase="starting")]) == "starting: actor, monitor"
    assert describe_start([learner, NodeStatus("actor", phase="stepping")]) == "compiling: learner"
    assert describe_start([NodeStatus("learner", phase="")]) == "collecting data for the first update"


def test_status_of_nodes_has_the_format_of_elastic_workers(directory):
    with RunLock(directory.path):
        append(directory, step=200, **ROW)
        busy = NodeStatus("actor/1", pid=7, host="here", phase="stepping", silent_for=2)
        dead = NodeStatus("learner", "WAITING", incarnation=3, host="here")
        ended = NodeStatus("monitor", "ENDED", host="here")
        StatusFile(directory, DESCRIBED, 1_000).watch(False, [busy, dead, ended])
        workers = StatusReader(directory.path)()["workers"]
        assert workers[0] == {
            "worker_id": "actor/1",
            "role": "actor",
            "index": 1,
            "incarnation": 0,
            "state": "BUSY",
            "host": "here",
            "pid": 7,
            "phase": "stepping",
            "silent_for": 2,
        }
        assert [(one["role"], one["index"], one["incarnation"], one["state"], one["pid"]) for one in workers[1:]] == [
            ("learner", 0, 3, "LOST", None),
            ("monitor", 0, 0, "GONE", None),
        ]
        assert "phase" not in workers[1]


def test_status_shows_how_a_run_ended(directory):
    result = Result(1_000, 9, None, None, 0, 1.0, 1.0, 10, "run", signal=int(signal.SIGTERM))
    status = StatusFile(directory, DESCRIBED, 1_000)
    assert job(directory)["state"] == "FAILED" and job(directory)["reason"].endswith(
        "was killed"
    )  # because no process holds the lock
    status.end(result)
    assert (job(directory)["state"], job(directory)["reason"]) == ("CLOSED", "stopped by SIGTERM")
    with pytest.raises(KeyboardInterrupt), status.record_failure():
        raise KeyboardInterrupt
    assert (job(directory)["state"], job(directory)["reason"]) == ("FAILED", "interrupted")
    with pytest.raises(ProgramError), status.record_failure():
        raise ProgramError("The node actor/0 failed.\nIts last lines")
    assert (job(directory)["state"], job(directory)["reason"]) == ("FAILED", "The node actor/0 failed.")


@pytest.mark.parametrize("what", ["begins", "ends"])
def test_run_that_starts_or_ends_during_a_read_is_not_reported_as_killed(directory, monkeypatch, what):
    lock, asked = RunLock(directory.path), []
    if what == "ends":
        lock.__enter__()
        status = StatusFile(directory, DESCRIBED, 1_000)
    else:
        StatusFile(directory, DESCRIBED, 1_000).write(state="CLOSED")

    def change(path):
        asked.append(path)
        if what == "ends" and len(asked) == 1:
            status.write(state="CLOSED", reason="1,000 steps")
            lock.__exit__(None, None, None)
        found = holder_of(path)
        if what == "begins" and len(asked) == 1:
            lock.__enter__()
            StatusFile(directory, DESCRIBED, 1_000)
        return found

    monkeypatch.setattr("rlframe.programs.run_dir.status.holder_of", change)
    assert job(directory)["state"] == ("INIT" if what == "begins" else "CLOSED")
    if what == "begins":
        lock.__exit__(None, None, None)


def test_single_process_run_has_a_status_during_and_after_training(tmp_path, capsys):
    seen = []
    described = make_experiment("dqn", steps=300, num_envs=1, log_every=100, eval_episodes=1, min_replay_size=100)
    look = lambda *_: seen.append(StatusReader(tmp_path / "run")())  # noqa: E731
    run_experiment(described, run_dir=tmp_path / "run", callbacks=[look])
    assert {one["job"]["state"] for one in seen} == {"RUNNING"} and seen[0]["job"]["topology"] == "single_process"
    assert [one["worker_id"] for one in seen[0]["workers"]] == ["train"]
    assert main(["status", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "dqn on CartPole-v1   over: 300 steps" in shown and "300 of 300 (100.0 %)" in shown
    assert main(["stop", str(tmp_path / "run")]) == 2
    assert "has already ended (CLOSED: 300 steps)." in capsys.readouterr().err


def test_stop_fails_if_the_run_cannot_save(directory, capsys):
    status = StatusFile(directory, DESCRIBED, 1_000)

    def end(number, frame):  # simulate a run that cannot save because the disk is full
        status.write(state="FAILED", reason="Cannot write checkpoints/9: No space left on device.")
        lock.__exit__(None, None, None)

    before = signal.signal(signal.SIGTERM, end)
    try:
        for options in ([], ["--json"]):
            status.write(state="RUNNING", reason="")
            lock = RunLock(directory.path).__enter__()
            assert main(["stop", str(directory.path), *options]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    told, ended = capsys.readouterr().out.splitlines()
    reason = "Cannot write checkpoints/9: No space left on device."
    assert told == f"The run has ended at 0 env steps (FAILED: {reason}). Nothing was saved."
    values = {"status": "failed", "state": "FAILED", "reason": reason, "saved": "Nothing was saved."}
    assert json.loads(ended) == values


def test_stop_ends_a_run_that_is_still_starting(directory, capsys):
    lock = RunLock(directory.path).__enter__()
    before = signal.signal(signal.SIGTERM, lambda *_: lock.__exit__(None, None, None))
    try:
        assert main(["stop", str(directory.path)]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out == "The run was still starting, and has ended. Nothing was saved.\n"


@pytest.mark.parametrize("command", ["status", "stop"])
def test_directory_without_a_run_is_refused(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"rlframe: There is no run in {tmp_path}: it has no config.json.\n"


@pytest.mark.parametrize("command", ["pause", "scale {} collector 2"])
def test_elastic_command_is_refused_for_other_topologies(directory, capsys, command):
    StatusFile(directory, make_experiment("dqn", topology="heavy_env"), 1_000)
    name, *words = (command if "{}" in command else f"{command} {{}}").split()
    assert main([name, *[word.format(directory.path) for word in words]]) == 2
    told = f"`rlframe {name}` needs the topology elastic, but the run in {directory.path} has the topology heavy_env."
    assert capsys.readouterr().err == f"rlframe: {told}\n"


@pytest.mark.system
@pytest.mark.parametrize("topology", ["single_process", "heavy_env"])
def test_status_and_stop_work_on_a_real_run(tmp_path, topology, capsys):
    run_dir = tmp_path / "run"
    options = ["--agent", "impala", "--steps", "100000000", "--log-every", "200", "--topology", topology]
    with RunningProgram(run_dir, *options) as program:
        program.wait_for_steps(200)
        assert main(["status", str(run_dir), "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert status["job"]["state"] == "RUNNING" and status["job"]["env_steps"] >= 200
        names = [one["worker_id"] for one in status["workers"]]
        assert names == (["train"] if topology == "single_process" else ["learner", "actor/0", "actor/1", "monitor"])
        assert all(one["pid"] for one in status["workers"])
        assert main(["stop", str(run_dir)]) == 0
        told = capsys.readouterr().out
        assert "CLOSED: stopped by SIGTERM" in told and f"The last checkpoint is {run_dir}/checkpoints/" in told
        assert program.finish()[0] == 128 + signal.SIGTERM
        assert main(["status", str(run_dir)]) == 0
        assert "over: stopped by SIGTERM" in capsys.readouterr().out


@pytest.mark.system
def test_status_and_stop_work_on_an_elastic_run(tmp_path, capsys):
    run_dir = tmp_path / "run"
    options = ["--agent", "dqn", "--steps", "100000000", "--log-every", "200", "--topology", "elastic"]
    with RunningProgram(run_dir, *options, "--num-actors", "1", "--max-actors", "1") as program:
        program.wait_for_steps(200)
        assert main(["status", str(run_dir)]) == 0
        shown = capsys.readouterr().out
        assert "dqn on CartPole-v1   running" in shown and "learner/0" in shown and "collector/0" in shown
        assert main(["stop", str(run_dir), "--reason", "enough"]) == 0
        told = capsys.readouterr().out
        assert "(CLOSED: enough). The last checkpoint is " in told
        assert program.finish()[0] == 0


@pytest.mark.system
def test_killed_run_has_the_status_failed(tmp_path, capsys):
    with RunningProgram(tmp_path / "run", "--agent", "impala", "--steps", "100000000", "--log-every", "200") as program:
        program.wait_for_steps(200)
        program.process.kill()
        program.process.wait()
        assert main(["status", str(tmp_path / "run")]) == 0
        assert f"failed: process {program.process.pid} on " in capsys.readouterr().out
