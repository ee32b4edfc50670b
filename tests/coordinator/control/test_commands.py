"""`rlframe status|scale|pause|unpause|stop` in this process, against the control API over a real socket."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.extras import needs

needs("trajectories")

from rlframe.cli import main
from rlframe.cli.run_control import has_reachable_coordinator
from rlframe.coordinator.control.address import (
    control_file,
    final_status_file,
    make_token_file,
    read_control,
    write_control,
)
from rlframe.coordinator.control.app import serve_control
from rlframe.coordinator.states import JobState
from rlframe.errors import UnavailableError
from rlframe.http.serving import ServerThread
from rlframe.programs import make_experiment
from rlframe.programs.run_dir.control import ControlAddress, serve_run_control
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.run_dir.lock import NAME, RunLock
from rlframe.programs.run_dir.status import StatusFile
from tests.coordinator.control.scripted_coordinator import ScriptedCoordinator


@pytest.fixture
def coordinator() -> ScriptedCoordinator:
    return ScriptedCoordinator()


@pytest.fixture
def server(coordinator: ScriptedCoordinator) -> Iterator[ServerThread]:
    with serve_control(coordinator, port=0) as server:
        yield server


def refused(capsys: pytest.CaptureFixture, *arguments: str, code: int = 2) -> str:
    """The one line that the command prints when it refuses."""
    assert main(list(arguments)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("rlframe: ")


def test_the_status_is_a_table_that_a_person_reads(coordinator, server, capsys):
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


def test_the_status_as_json_is_the_coordinators(coordinator, server, capsys):
    assert main(["status", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == coordinator.status()


def test_watch_goes_on_until_the_job_is_over(coordinator, server, capsys):
    seen = []
    answer = coordinator.status

    def status():  # what happens between two looks
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
        ("scale collector 9", "This job has between 1 and 8 of the role collector, not 9."),
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
def test_wrong_input_is_one_sentence_and_exit_code_2(server, capsys, command, message):
    assert refused(capsys, *command.split(), "--url", server.url).startswith(message)


@pytest.mark.parametrize(
    "command, message",
    [
        ("status", "Name one run: give either RUN_DIR or the --url of its control."),
        ("stop", "Name one run: give either RUN_DIR or the --url of its control."),
        ("scale collector 4", "Name one run: give either RUN_DIR or the --url of its control."),
        ("pause nowhere --url http://127.0.0.1:1", "Name one run: give either RUN_DIR or the --url of its control."),
        ("status --url nonsense", "'nonsense' is no URL of a coordinator's control, as http://127.0.0.1:8765 is"),
        ("pause nowhere", "There is no nowhere/control.json: the run in nowhere has no control"),
    ],
)
def test_one_run_is_named(capsys, tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *command.split()).startswith(message)


def test_a_job_that_is_over_is_said_to_be(coordinator, server, capsys):
    coordinator.become(JobState.DRAINING)
    coordinator.become(JobState.CLOSED, "100,000 environment steps")
    assert refused(capsys, "pause", "--url", server.url).startswith(
        "The job is over: CLOSED (100,000 environment steps)."
    )


def test_nobody_listens(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listened at
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert refused(capsys, "status", "--url", url, code=1).startswith(f"Nobody listens at {url}")


def test_something_else_listens(capsys):
    class Silent(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Silent) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        told = refused(capsys, "status", "--url", url, code=1)
    assert told.startswith(f"{url} answered 501 and nothing that a coordinator's control says")


def test_a_run_directory_knows_where_its_control_is_and_its_token(coordinator, tmp_path, capsys):
    token = make_token_file(tmp_path)
    assert make_token_file(tmp_path) == token  # a run that is resumed keeps its secret
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    with serve_control(coordinator, port=0, token_file=token) as server:
        write_control(tmp_path, server.url, token)
        assert read_control(tmp_path).url == server.url
        assert main(["scale", str(tmp_path), "collector", "3"]) == 0
        capsys.readouterr()
        told = refused(capsys, "pause", "--url", server.url)
        assert told.startswith(f"{server.url} wants a token, and this is not it: name its file by --token-file, or")
        assert main(["pause", "--url", server.url, "--token-file", token]) == 0
    assert coordinator.calls == [("scale", "collector", 3), ("pause",)]


def test_a_run_that_has_ended_names_no_control_whose_port_may_be_anothers(tmp_path, capsys):
    with serve_run_control(tmp_path, ControlAddress(), "localhost:1"):
        assert read_control(tmp_path).pid == os.getpid()
    capsys.readouterr()
    assert "is over (then" in refused(capsys, "pause", str(tmp_path))
    with serve_run_control(tmp_path, ControlAddress(), "localhost:1"):
        content = control_file(tmp_path).read_text().replace(f'"pid": {os.getpid()}', '"pid": 1')
        control_file(tmp_path).write_text(content)  # of a session that came later
    assert read_control(tmp_path).pid == 1


def test_the_status_of_a_run_that_is_over_is_its_last(coordinator, tmp_path, capsys):
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
    assert "is over (then" in refused(capsys, "pause", str(tmp_path))


def test_a_run_whose_control_was_killed_when_it_was_over_has_its_last_status(coordinator, tmp_path, capsys):
    with serve_control(coordinator, port=0) as server:
        write_control(tmp_path, server.url, None)
    os.utime(control_file(tmp_path), (1, 1))
    final_status_file(tmp_path).parent.mkdir()
    final_status_file(tmp_path).write_text(json.dumps(coordinator.status()))
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == coordinator.status()
    os.utime(final_status_file(tmp_path), (0, 0))  # of the session before the one that was killed
    assert refused(capsys, "status", str(tmp_path)).startswith("There is no run in")


@pytest.fixture
def directory(tmp_path) -> RunDir:
    """Of an elastic run."""
    directory, described = RunDir(tmp_path / "run"), make_experiment("dqn", topology="elastic", steps=1_000)
    directory.create()
    directory.write_config(described, {})
    StatusFile(directory, described, 1_000)
    return directory


def test_watch_ends_well_with_a_run_whose_control_ends_before_that_is_seen(coordinator, directory, monkeypatch, capsys):
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


def test_the_control_of_a_run_on_another_host_is_not_looked_for_here(coordinator, directory, capsys):
    with RunLock(directory.path):
        holder = {**json.loads((directory.path / NAME).read_text()), "host": "far", "boot": "another kernel's"}
    (directory.path / NAME).write_text(json.dumps(holder))
    with serve_control(coordinator, port=0) as server:
        write_control(directory.path, server.url, None)
        assert main(["status", str(directory.path)]) == 0
        assert "dqn on CartPole-v1   starting" in capsys.readouterr().out
        assert "on far" in refused(capsys, "stop", str(directory.path))
        told = refused(capsys, "pause", str(directory.path))
        assert told.startswith(f"The control of the run in {directory.path} is at {server.url} on another host")
    assert (coordinator.asked, coordinator.calls) == (0, [])
    write_control(directory.path, "http://192.0.2.1:8765", None)  # an address that means the same machine anywhere
    assert has_reachable_coordinator(str(directory.path))


@pytest.mark.parametrize("command", [("pause",), ("unpause",), ("scale", "collector", "2")])
def test_a_run_that_was_killed_is_not_asked(coordinator, directory, capsys, command):
    append = directory.path / "metrics.jsonl"
    append.write_text(json.dumps({"step": 1234, "episode_return": 20.0}) + "\n")
    with serve_control(coordinator, port=0) as server:  # its port is another run's by now
        write_control(directory.path, server.url, None)
        told = refused(capsys, command[0], str(directory.path), *command[1:])
    assert (coordinator.asked, coordinator.calls) == (0, [])
    assert told.startswith(f"The run in {directory.path} is not active (FAILED at 1,234 env steps: process ")
    assert told.endswith(f"was killed). `rlframe {command[0]}` needs an active run.")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": 2, "url": "http://x", "token_file": null, "pid": 1}'])
def test_a_control_file_that_is_none_is_said_to_be(tmp_path, capsys, content):
    control_file(tmp_path).write_text(content)
    assert "is not what a run writes there" in refused(capsys, "pause", str(tmp_path))
