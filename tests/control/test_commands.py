"""Tests of `rlframe status|scale|pause|unpause|stop` in this process, with the control API on a real socket."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import threading

import pytest

from tests.extras import needs

needs("trajectories")

from rlframe.cli import main
from rlframe.cli.run_control import has_reachable_coordinator
from rlframe.control.address import (
    control_file,
    final_status_file,
    make_token_file,
    read_control,
    write_control,
)
from rlframe.control.app import serve_control
from rlframe.coordinator.states import JobState
from rlframe.errors import UnavailableError
from rlframe.programs import make_experiment
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.run_dir.lock import NAME, RunLock
from rlframe.programs.run_dir.status import ControlAddress, StatusFile, serve_run_control


def refused(capsys: pytest.CaptureFixture, *arguments: str, code: int = 2) -> str:
    """Run a command that must fail, and return the one line that it prints."""
    assert main(list(arguments)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("rlframe: ")


def test_status_command_prints_a_table(coordinator, server, capsys):
    coordinator.job["reason"] = "[bold]no markup[/bold]"
    assert main(["status", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    for part in (
        "dqn on CartPole-v1   running: [bold]no markup[/bold]",
        "24,000 of 100,000 (24.0 %, about 40 s left)",
        "231.5 in training, 310.2 in evaluation of version 140",
        "1 learner, 2 collector, 1 evaluator (collectors: 1 to 8, auto)",
    ):
        assert part in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith(("learner/", "collector/", "evaluator/"))]
    assert [row[:2] for row in rows] == [
        ["learner/0", "BUSY"],
        ["evaluator/0", "IDLE"],
        ["collector/0", "BUSY"],
        ["collector/1", "BUSY"],
    ]


def test_json_status_equals_the_coordinators_status(coordinator, server, capsys):
    assert main(["status", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == coordinator.status()


def test_watch_continues_until_the_job_is_over(coordinator, server, capsys):
    seen = []
    answer = coordinator.status

    def status():  # the job's state changes from call to call
        seen.append(coordinator.job["state"])
        if len(seen) == 2:
            coordinator.become(JobState.DRAINING)
        elif len(seen) == 3:
            raise UnavailableError("It restarts.")
        elif len(seen) == 4:
            coordinator.become(JobState.CLOSED, "done")
        return answer()

    coordinator.status = status
    assert main(["status", "--url", server.url, "--watch", "--interval", "0.25", "--json"]) == 0
    printed = capsys.readouterr()
    states = [json.loads(line)["job"]["state"] for line in printed.out.splitlines()]
    assert states == ["RUNNING", "DRAINING", "CLOSED"]
    assert printed.err.strip() == "rlframe: It restarts."


@pytest.mark.parametrize(
    "command, call",
    [
        ("scale collector 4", ("scale", "collector", 4)),
        ("pause", ("pause",)),
        ("stop --reason enough", ("cancel", "enough")),
    ],
)
def test_a_command_calls_the_coordinator(coordinator, server, capsys, command, call):
    assert main([*command.split(), "--url", server.url]) == 0
    assert coordinator.calls == [call]
    assert capsys.readouterr().out.count("\n") == 1


def test_pause_and_unpause(coordinator, server):
    assert main(["pause", "--url", server.url]) == 0 and coordinator.job["state"] == "PAUSED"
    assert main(["unpause", "--url", server.url, "--json"]) == 0 and coordinator.job["state"] == "RUNNING"


@pytest.mark.parametrize(
    "command, message",
    [
        ("scale collector 9", "The number of workers of the role collector must be between 1 and 8, got 9."),
        (
            "scale colector 2",
            "'colector' is not a role; roles are learner, collector, evaluator. Did you mean 'collector'?",
        ),
        ("scale collector", "Give the number of workers: rlframe scale [RUN_DIR] collector N."),
        ("scale", "Name a role and a number; roles are learner, collector, evaluator."),
        ("unpause", "The job is not paused."),
        ("status --interval 0", "--interval must be between 0.1 and 3600 seconds, got 0."),
    ],
)
def test_wrong_input_prints_one_line_and_exits_with_2(server, capsys, command, message):
    assert refused(capsys, *command.split(), "--url", server.url).startswith(message)


@pytest.mark.parametrize(
    "command, message",
    [
        ("status", "Name one run: give either RUN_DIR or --url with the URL of the run's HTTP service."),
        ("stop", "Name one run: give either RUN_DIR or --url with the URL of the run's HTTP service."),
        ("scale collector 4", "Name one run: give either RUN_DIR or --url with the URL of the run's HTTP service."),
        (
            "pause nowhere --url http://127.0.0.1:1",
            "Name one run: give either RUN_DIR or --url with the URL of the run's HTTP service.",
        ),
        ("status --url nonsense", "'nonsense' is not the URL of a control API, such as http://127.0.0.1:8765"),
        ("pause nowhere", "There is no nowhere/control.json: the run in nowhere has no control API"),
    ],
)
def test_commands_require_exactly_one_valid_run(capsys, tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *command.split()).startswith(message)


def test_command_after_the_end_of_the_job_prints_that_the_job_is_over(coordinator, server, capsys):
    coordinator.become(JobState.DRAINING)
    coordinator.become(JobState.CLOSED, "100,000 environment steps")
    assert refused(capsys, "pause", "--url", server.url).startswith(
        "The job is over: CLOSED (100,000 environment steps)."
    )


def test_status_of_an_unused_port_is_refused(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # the port is bound, but nothing listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert refused(capsys, "status", "--url", url, code=1).startswith(f"Nothing listens at {url}.")


def test_response_of_another_service_is_reported(capsys):
    class Silent(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Silent) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        told = refused(capsys, "status", "--url", url, code=1)
    assert told.startswith(f"{url} answered 501 with a body that is not from a control API")


def test_commands_find_the_control_url_and_token_in_the_run_directory(coordinator, tmp_path, capsys):
    token = make_token_file(tmp_path)
    assert make_token_file(tmp_path) == token  # a resumed run keeps its token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    with serve_control(coordinator, port=0, token_file=token) as server:
        write_control(tmp_path, server.url, token)
        assert read_control(tmp_path).url == server.url
        assert main(["scale", str(tmp_path), "collector", "3"]) == 0
        capsys.readouterr()
        told = refused(capsys, "pause", "--url", server.url)
        assert told.startswith(f"{server.url} requires a token, and the given token is missing or wrong. Name its file")
        assert main(["pause", "--url", server.url, "--token-file", token]) == 0
    assert coordinator.calls == [("scale", "collector", 3), ("pause",)]


def test_control_file_is_removed_when_the_session_ends(tmp_path, capsys):
    with serve_run_control(tmp_path, ControlAddress(), "localhost:1"):
        assert read_control(tmp_path).pid == os.getpid()
    capsys.readouterr()
    assert "has not started, or is over" in refused(capsys, "pause", str(tmp_path))
    with serve_run_control(tmp_path, ControlAddress(), "localhost:1"):
        content = control_file(tmp_path).read_text().replace(f'"pid": {os.getpid()}', '"pid": 1')
        control_file(tmp_path).write_text(content)  # as if a later session had written it
    assert read_control(tmp_path).pid == 1


def test_status_of_a_finished_run_is_its_final_status(coordinator, tmp_path, capsys):
    coordinator.become(JobState.DRAINING)
    coordinator.become(JobState.CLOSED, "100,000 environment steps")
    final_status_file(tmp_path).parent.mkdir()
    with serve_run_control(tmp_path, ControlAddress(), "localhost:1"):
        final_status_file(tmp_path).write_text(json.dumps(coordinator.status()))
    capsys.readouterr()
    assert main(["status", str(tmp_path), "--watch"]) == 0
    shown = capsys.readouterr()
    assert "dqn on CartPole-v1   over: 100,000 environment steps" in shown.out and "learner/0" in shown.out
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == coordinator.status()
    assert "has not started, or is over" in refused(capsys, "pause", str(tmp_path))


def test_final_status_is_read_if_it_is_newer_than_a_leftover_control_file(coordinator, tmp_path, capsys):
    with serve_control(coordinator, port=0) as server:
        write_control(tmp_path, server.url, None)
    os.utime(control_file(tmp_path), (1, 1))
    final_status_file(tmp_path).parent.mkdir()
    final_status_file(tmp_path).write_text(json.dumps(coordinator.status()))
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == coordinator.status()
    os.utime(final_status_file(tmp_path), (0, 0))  # the file is older, as if an earlier session had written it
    assert refused(capsys, "status", str(tmp_path)).startswith("There is no run in")


@pytest.fixture
def directory(tmp_path) -> RunDir:
    """Return the directory of an elastic run."""
    directory, described = RunDir(tmp_path / "run"), make_experiment("dqn", topology="elastic", steps=1_000)
    directory.create()
    directory.write_config(described, {})
    StatusFile(directory, described, 1_000)
    return directory


def test_watch_succeeds_if_the_control_api_ends_before_the_last_poll(coordinator, directory, monkeypatch, capsys):
    monkeypatch.setattr("rlframe.cli.status._AWAY", 2.0)
    asked, answer = threading.Event(), coordinator.status

    def status():
        asked.set()
        return answer()

    def end() -> None:
        assert asked.wait(30.0)
        goes_on.close()
        coordinator.become(JobState.DRAINING)
        coordinator.become(JobState.CLOSED, "done")
        final_status_file(directory.path).parent.mkdir()
        final_status_file(directory.path).write_text(json.dumps(coordinator.status()))
        lock.__exit__(None, None, None)

    coordinator.status = status
    with contextlib.ExitStack() as goes_on, RunLock(directory.path) as lock:
        server = goes_on.enter_context(serve_control(coordinator, port=0))
        write_control(directory.path, server.url, None)
        os.utime(control_file(directory.path), (1, 1))
        thread = threading.Thread(target=end)
        thread.start()
        assert main(["status", str(directory.path), "--watch", "--interval", "0.1", "--json"]) == 0
        thread.join()
    states = [json.loads(line)["job"]["state"] for line in capsys.readouterr().out.splitlines()]
    assert states[0] == "RUNNING" and states[-1] == "CLOSED"


def test_loopback_url_of_a_run_on_another_host_is_not_called(coordinator, directory, capsys):
    with RunLock(directory.path):
        holder = {**json.loads((directory.path / NAME).read_text()), "host": "far", "boot": "another kernel's"}
    (directory.path / NAME).write_text(json.dumps(holder))
    with serve_control(coordinator, port=0) as server:
        write_control(directory.path, server.url, None)
        assert main(["status", str(directory.path)]) == 0
        assert "dqn on CartPole-v1   starting" in capsys.readouterr().out
        assert "on far" in refused(capsys, "stop", str(directory.path))
        told = refused(capsys, "pause", str(directory.path))
        assert told.startswith(f"The control API of the run in {directory.path} is at {server.url} on another host")
    assert (coordinator.asked, coordinator.calls) == (0, [])
    write_control(directory.path, "http://192.0.2.1:8765", None)  # another host can reach this address
    assert has_reachable_coordinator(str(directory.path))


@pytest.mark.parametrize("command", [("pause",), ("unpause",), ("scale", "collector", "2")])
def test_control_url_of_a_killed_run_is_not_called(coordinator, directory, capsys, command):
    append = directory.path / "metrics.jsonl"
    append.write_text(json.dumps({"step": 1234, "episode_return": 20.0}) + "\n")
    with serve_control(coordinator, port=0) as server:  # another run now uses the port
        write_control(directory.path, server.url, None)
        told = refused(capsys, command[0], str(directory.path), *command[1:])
    assert (coordinator.asked, coordinator.calls) == (0, [])
    assert told.startswith(f"The run in {directory.path} is not active (FAILED at 1,234 env steps: process ")
    assert told.endswith(f"was killed). `rlframe {command[0]}` needs an active run.")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": 2, "url": "http://x", "token_file": null, "pid": 1}'])
def test_invalid_control_file_is_refused(tmp_path, capsys, content):
    control_file(tmp_path).write_text(content)
    assert "is not a valid control file" in refused(capsys, "pause", str(tmp_path))
