"""The HTTP service of a run without a coordinator: status, metrics, live page and stop."""

from __future__ import annotations

import json
import pathlib
import pty
import re
import signal
import sys
import threading

import pytest

pytest.importorskip("fastapi")
import httpx

from rlframe.cli import main
from rlframe.control.address import read_control
from rlframe.engines.base import NodeStatus
from rlframe.engines.stopping import StopSignal
from rlframe.errors import UsageError
from rlframe.programs import make_experiment, run_experiment
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.run_dir.lock import RunLock
from rlframe.programs.run_dir.status import ControlAddress, LocalRunTarget, StatusFile, serve_run_control
from rlframe.programs.session import Shared
from tests.control.scripted_coordinator import ScriptedCoordinator

DESCRIBED = make_experiment("dqn", steps=1_000)


def test_each_run_directory_has_a_constant_unique_key(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    key = RunDir(tmp_path / "one").key()
    assert len(key) == 32 and RunDir(tmp_path / "one").key() == key != RunDir(tmp_path / "two").key()


@pytest.fixture
def directory(tmp_path):
    """The directory of a fake run that has this process as its owner."""
    directory = RunDir(tmp_path / "run")
    directory.create()
    directory.write_config(DESCRIBED, {})
    row = {"step": 400, "episode_return": 20.5, "steps_per_second": 100.0, "learner_steps": 9, "params_version": 10}
    directory.metrics.write_text(json.dumps(row) + "\n")
    with RunLock(directory.path):
        StatusFile(directory, DESCRIBED, 1_000).watch(
            False, [NodeStatus(name, incarnation=1, pid=7) for name in ("learner", "actor/0")]
        )
        yield directory


def client(run_dir: pathlib.Path) -> httpx.Client:
    known = read_control(run_dir)
    token = pathlib.Path(known.token_file).read_text().strip()
    return httpx.Client(base_url=known.url, headers={"Authorization": f"Bearer {token}"}, timeout=60.0)


def test_http_service_shows_the_run_and_can_only_stop_it(directory, monkeypatch):
    killed = []
    monkeypatch.setattr("rlframe.programs.run_dir.status.os.kill", lambda pid, number: killed.append(number))
    with StopSignal(), serve_run_control(directory.path, ControlAddress()), client(directory.path) as http:
        assert http.get("/healthz", headers={"Authorization": ""}).json() == {"status": "ok"}
        assert http.get("/status", headers={"Authorization": ""}).status_code == 401
        status = http.get("/status").json()
        assert (status["job"]["state"], status["job"]["env_steps"]) == ("RUNNING", 400)
        assert [one["worker_id"] for one in status["workers"]] == ["learner", "actor/0"]
        metrics = http.get("/metrics").text
        for line in (
            "rlframe_run_up 1.0",
            "rlframe_run_env_steps_total 400.0",
            "rlframe_run_worker_restarts_total 2.0",
            'rlframe_run_job_state{state="RUNNING"} 1.0',
            'rlframe_run_workers{role="actor",state="BUSY"} 1.0',
        ):
            assert line in metrics.splitlines()
        for path in ("/pause", "/scale", "/restore"):
            assert http.post(path, json={}).status_code == 404
        # Two requests must send only one signal, because a second signal ends the run without saving.
        for _ in range(2):
            assert http.post("/stop", json={"reason": "enough"}).status_code == 200
    assert killed == [signal.SIGTERM]
    assert not (directory.path / "control.json").exists()


def test_token_is_printed_only_to_a_terminal(directory, monkeypatch, capsys):
    with serve_run_control(directory.path, ControlAddress()):
        token = (directory.path / "token").read_text().strip()
    assert token not in capsys.readouterr().err
    ours, theirs = pty.openpty()
    with open(ours) as terminal, open(theirs, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with serve_run_control(directory.path, ControlAddress()):
            told = re.search(r"(http://\S+)/#token=(\S+) \(token: ", terminal.readline())
            assert told is not None and told[2] == token
            asked = httpx.get(f"{told[1]}/status", headers={"Authorization": f"Bearer {told[2]}"}, timeout=60.0)
            assert asked.status_code == 200


@pytest.mark.parametrize("has_coordinator", [False, True])
def test_http_service_refuses_requests_without_the_right_token(directory, monkeypatch, has_coordinator):
    killed = []  # replace `os.kill`, because an accepted stop would end this process
    monkeypatch.setattr("rlframe.programs.run_dir.status.os.kill", lambda pid, number: killed.append(number))
    coordinator = ScriptedCoordinator() if has_coordinator else None
    with serve_run_control(directory.path, ControlAddress(), coordinator):
        known = read_control(directory.path)
        secret = pathlib.Path(known.token_file)
        assert secret == directory.path / "token" and secret.stat().st_mode & 0o777 == 0o600
        with httpx.Client(base_url=known.url, timeout=60.0) as http:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": secret.read_text().strip()}):
                for method, path in (("GET", "/status"), ("GET", "/metrics"), ("POST", "/stop")):
                    assert http.request(method, path, headers=headers).status_code == 401
        with client(directory.path) as http:
            assert http.get("/status").status_code == 200
    assert killed == [] and (coordinator is None or coordinator.calls == [])


def test_status_request_before_the_start_of_the_run_gets_503(directory):
    directory.status.unlink()
    with serve_run_control(directory.path, ControlAddress()), client(directory.path) as http:
        answer = http.get("/status")
        assert answer.status_code == 503 and "The run is starting" in answer.json()["error"]["message"]


def test_concurrent_status_requests_read_each_row_of_the_logs_only_once(directory):
    rows = [{"step": step, "episode_return": 1.0} for step in range(400)]
    directory.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    target = LocalRunTarget(directory.path)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=target.status) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert [step for step, _ in target.status()["returns"]] == list(range(400))


def test_run_that_receives_no_signals_refuses_to_stop(directory):
    with pytest.raises(UsageError, match="cannot be stopped: it is not in the main thread"):
        LocalRunTarget(directory.path).cancel()


def test_cancelled_run_of_one_seed_does_not_stop_the_other_seeds_of_its_process(directory, monkeypatch):
    monkeypatch.setattr("rlframe.programs.run_dir.status.os.kill", lambda *_: pytest.fail("a signal stops all seeds"))
    stop = StopSignal()
    with (
        serve_run_control(directory.path, ControlAddress(), shared=Shared(None, stop)),
        client(directory.path) as http,
    ):
        assert http.post("/stop", json={"reason": "enough"}).status_code == 200
    assert stop.number == signal.SIGTERM and not stop.is_repeated


@pytest.mark.system
def test_single_process_run_serves_its_status_while_training(tmp_path):
    seen = []

    def look(*_):
        thread = threading.Thread(target=lambda: seen.append(ask()))
        thread.start()
        thread.join(60.0)

    def ask():
        with client(tmp_path / "run") as http:
            return http.get("/status").json()["job"]

    described = make_experiment("dqn", steps=300, num_envs=2, log_every=100, eval_episodes=1, min_replay_size=100)
    run_experiment(described, run_dir=tmp_path / "run", callbacks=[look], control_address=ControlAddress())
    assert seen[0]["state"] == "RUNNING" and seen[0]["topology"] == "single_process"
    assert not (tmp_path / "run/control.json").exists()


def test_http_host_is_refused_without_an_http_service(tmp_path, capsys):
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--http-host", "0.0.0.0"]) == 2
    told = "http_host is an option of the HTTP service, but this run has none. Add --http PORT."
    assert capsys.readouterr().err.splitlines()[-1] == f"rlframe: {told}"


@pytest.mark.system
def test_live_page_shows_the_run_and_only_commands_that_it_supports(directory):
    chromium = pytest.importorskip("tests.chromium")
    if chromium.CHROMIUM is None:
        pytest.skip("The page's tests need Chromium: apt-get install chromium, or make chromium")
    with (
        serve_run_control(directory.path, ControlAddress()),
        chromium.running_browser() as browser,
        chromium.checked_pages(browser) as new_page,
    ):
        known = read_control(directory.path)
        page = new_page(known.url)
        page.goto(f"{known.url}/#token={pathlib.Path(known.token_file).read_text().strip()}")
        chromium.expect(page.locator("#state")).to_have_text("RUNNING")
        chromium.expect(page.locator("#steps")).to_have_text("400 of 1,000 environment steps (40 %)")
        assert page.locator("#workers tbody tr").locator("th").all_text_contents() == ["learner", "actor/0"]
        assert page.locator("#tile-restarts").text_content() == "Restarts2of workers"
        visible = {
            name: page.locator(f"#{name}").is_visible() for name in ("stop", "pause", "stepper", "tasks", "events")
        }
        assert visible == {"stop": True, "pause": False, "stepper": False, "tasks": False, "events": False}
        assert re.search("dqn on CartPole-v1", page.title())
