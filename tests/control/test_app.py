"""Tests of the control API over a real socket, with a scripted coordinator."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.extras import needs
from tests.waiting import wait_until

needs("trajectories")
from rlframe.control.app import serve_control
from rlframe.control.calls import MAX_CALLS, STATUS_MAX_AGE
from rlframe.control.client import ControlClient
from rlframe.coordinator.states import JobState
from rlframe.errors import ConflictError, PeerError, UnavailableError, UsageError
from rlframe.http.serving import ServerThread
from tests.control.scripted_coordinator import MAX_ACTORS, ScriptedCoordinator

DEADLINE = 30.0  # seconds for any response, long enough for a busy machine


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[ScriptedCoordinator, httpx.Client]]:
    """Yield a shared server for tests in which the server refuses every request."""
    coordinator = ScriptedCoordinator()
    with serve_control(coordinator, port=0) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as client:
        yield coordinator, client
    assert coordinator.calls == []


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=DEADLINE) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"type", "message", "field"}
    return error


def read_events(lines: Iterator[str], count: int) -> list[tuple[int, dict]]:
    """Return (id, data) of the next `count` server-sent events."""
    found, number = [], -1
    for line in lines:
        if line.startswith("id: "):
            number = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            found.append((number, json.loads(line.removeprefix("data: "))))
            if len(found) == count:
                break
    return found


def test_status_endpoint_returns_the_coordinators_status(coordinator, http):
    assert http.get("/status").json() == coordinator.status()


def test_concurrent_status_requests_share_one_call(coordinator, http, monkeypatch):
    monkeypatch.setattr("rlframe.control.calls.STATUS_DEADLINE", DEADLINE)
    coordinator.gate.clear()
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(http.get("/status").status_code)) for _ in range(20)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    coordinator.gate.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert answers == [200] * 20
    assert (
        coordinator.asked <= 2 + (time.monotonic() - began) / STATUS_MAX_AGE
    )  # without the cache, there would be 20 calls


@pytest.mark.parametrize(
    "path, body, call",
    [
        ("/pause", None, ("pause",)),
        ("/evaluate", None, ("evaluate_now",)),
        ("/checkpoint", None, ("checkpoint",)),
        ("/restore", None, ("restore",)),
        ("/scale", {"role": "collector", "n": 4}, ("scale", "collector", 4)),
        ("/stop", {"reason": "enough"}, ("cancel", "enough")),
    ],
)
def test_each_command_makes_one_call_to_the_coordinator(coordinator, http, path, body, call):
    assert http.post(path, json=body).json()["status"] == "ok"
    assert coordinator.calls == [call]


def test_next_status_shows_the_effect_of_a_command(http):
    assert http.get("/status").json()["job"]["state"] == "RUNNING"
    http.post("/pause")
    assert http.get("/status").json()["job"]["state"] == "PAUSED"
    http.post("/resume")
    assert http.get("/status").json()["job"]["state"] == "RUNNING"


def test_response_contains_the_return_value_of_the_command(http):
    assert http.post("/checkpoint").json() == {"status": "ok", "result": "step 1500"}


@pytest.mark.parametrize(
    "body, field",
    [
        ({"role": "collector", "n": MAX_ACTORS + 1}, "n"),
        ({"role": "collector", "n": 0}, "n"),
        ({"role": "collector", "n": -1}, "n"),
        ({"role": "collector", "n": True}, "n"),
        ({"role": "collector", "n": "4"}, "n"),
        ({"role": "collector", "n": 2.5}, "n"),
        ({"role": "collector", "n": 10**30}, "n"),
        ({"role": "colector", "n": 2}, "role"),
        ({"role": ["collector"], "n": 2}, "role"),
        ({"n": 2}, "role"),
        ({"role": "collector"}, "n"),
        ({"role": "collector", "n": 2, "N": 3}, "N"),
    ],
)
def test_invalid_field_is_refused_and_named(shared, body, field):
    error = error_of(shared[1].post("/scale", json=body), 422)
    assert (error["type"], error["field"]) == ("invalid", field)
    assert len(error["message"]) < 300 and shared[0].calls == []


def test_error_message_contains_the_limits_and_the_received_number(shared):
    message = error_of(shared[1].post("/scale", json={"role": "collector", "n": 9}), 422)["message"]
    assert message == "The number of workers of the role collector must be between 1 and 8, got 9."


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b'{"role": "collector", "n": NaN}', b"[" * 100_000])
def test_body_that_is_not_a_json_object_is_refused(shared, body):
    response = shared[1].post("/scale", content=body, headers={"Content-Type": "application/json"})
    error = error_of(response, 400 if len(body) > 1000 else 422)  # the long body is nested too deeply to parse
    assert len(error["message"]) < 300 and shared[0].calls == []


def test_too_large_body_is_refused(shared):
    error_of(shared[1].post("/scale", content=b"[" + b" " * (2 << 20) + b"]"), 413)


def test_commands_after_the_end_of_the_job_are_refused(coordinator, http):
    coordinator.become(JobState.DRAINING)
    coordinator.become(JobState.CLOSED, "100,000 environment steps")
    for path, body in (("/pause", None), ("/evaluate", None), ("/stop", {}), ("/scale", {"role": "collector", "n": 3})):
        error = error_of(http.post(path, json=body), 409)
        assert error["type"] == "conflict"
        assert error["message"].startswith("The job is over: CLOSED (100,000 environment steps).")
    assert coordinator.calls == []


def test_usage_error_of_the_coordinator_becomes_a_409_with_its_message(http):
    assert error_of(http.post("/resume"), 409)["message"] == "The job is not paused."


def test_second_evaluation_is_refused(coordinator, http):
    coordinator.evaluates = True
    error = error_of(http.post("/evaluate"), 409)
    assert (error["type"], error["message"]) == ("conflict", "An evaluation is already in progress.")
    with ControlClient(str(http.base_url)) as client, pytest.raises(ConflictError, match="is already in progress"):
        client.evaluate_now()
    coordinator.evaluates = False
    assert http.post("/evaluate").status_code == 200


def test_client_can_restore_the_learner(coordinator, http):
    with ControlClient(str(http.base_url)) as client:
        client.restore()
    assert coordinator.calls == [("restore",)]


def test_unreachable_coordinator_gives_503_until_it_returns(coordinator, http):
    assert http.get("/status").status_code == 200
    coordinator.away = PeerError("The coordinator at localhost:1 did not answer status() within 2 s.")
    wait_until(lambda: http.get("/status").status_code == 503)  # the last status is cached for 0.2 s
    response = http.get("/status")
    assert error_of(response, 503) == {"type": "unavailable", "message": str(coordinator.away), "field": None}
    assert response.headers["retry-after"] == "1"
    error_of(http.post("/pause"), 503)
    assert http.get("/healthz").json() == {"status": "ok"}
    assert "rlframe_coordinator_up 0.0" in http.get("/metrics").text
    coordinator.away = None
    wait_until(lambda: http.get("/status").status_code == 200)
    assert http.get("/status").json()["job"]["state"] == "RUNNING"


def test_unexpected_exception_of_the_coordinator_gives_503(coordinator, http):
    coordinator.away = KeyError("workers")
    assert "KeyError" in error_of(http.get("/status"), 503)["message"]


def test_hanging_coordinator_gives_503_after_the_deadline(coordinator, http, monkeypatch):
    monkeypatch.setattr("rlframe.control.calls.STATUS_DEADLINE", 0.3)
    coordinator.gate.clear()
    assert "did not answer status() within 0.3 s" in error_of(http.get("/status"), 503)["message"]
    coordinator.gate.set()
    assert http.get("/healthz").status_code == 200


def test_number_of_hanging_calls_is_limited(coordinator, http):
    coordinator.gate.clear()
    answers: queue.Queue[httpx.Response] = queue.Queue()
    threads = [threading.Thread(target=lambda: answers.put(http.post("/evaluate"))) for _ in range(MAX_CALLS + 1)]
    for thread in threads:
        thread.start()
    refused = answers.get(timeout=DEADLINE)  # the other calls still wait for the coordinator
    assert "already wait for the coordinator" in error_of(refused, 503)["message"]
    coordinator.gate.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert http.get("/status").status_code == 200


def test_events_after_a_number_are_returned(coordinator, http):
    for i in range(3):
        coordinator.happen("worker", f"number {i}", worker_id="collector/0")
    told = http.get("/events", params={"since": 2}).json()["events"]
    assert [(event["number"], event["text"]) for event in told] == [(3, "number 1"), (4, "number 2")]
    assert told[0]["worker_id"] == "collector/0"
    for since in ("-1", "x", "1e3", str(2**60)):
        assert error_of(http.get("/events", params={"since": since}), 422)["field"] == "since"


def test_stream_starts_with_past_events_and_continues(coordinator, http):
    coordinator.happen("worker", "before")
    with http.stream("GET", "/events/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert [number for number, _ in read_events(lines, 2)] == [1, 2]
        coordinator.happen("worker", "line one\nline two")
        assert [(number, event["text"]) for number, event in read_events(lines, 1)] == [(3, "line one\nline two")]


def test_stream_resumes_after_the_given_event_number(coordinator, http):
    for i in range(5):
        coordinator.happen("worker", str(i))
    for asked in ({"headers": {"Last-Event-ID": "4"}}, {"params": {"since": 4}}):
        with http.stream("GET", "/events/stream", **asked) as response:
            assert [number for number, _ in read_events(response.iter_lines(), 2)] == [5, 6]
    assert http.get("/events/stream", headers={"Last-Event-ID": "x"}).status_code == 422


def test_stream_without_events_sends_comments(coordinator, http, monkeypatch):
    monkeypatch.setattr("rlframe.control.calls.HEARTBEAT", 0.05)
    with http.stream("GET", "/events/stream", params={"since": 1}) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith(":")) == ": here"


def test_stream_continues_after_a_restart_of_the_coordinator(coordinator, http, monkeypatch):
    monkeypatch.setattr("rlframe.control.calls._RETRY_AFTER", 0.01)
    with http.stream("GET", "/events/stream") as response:
        lines = response.iter_lines()
        read_events(lines, 1)
        coordinator.away = UnavailableError("It restarts.")
        coordinator.happen("coordinator", "It is back.")
        coordinator.away = None
        assert read_events(lines, 1)[0][1]["text"] == "It is back."


def test_streams_end_when_the_service_closes(coordinator, monkeypatch):
    monkeypatch.setattr("rlframe.http.serving.DRAIN", 100)
    with (
        serve_control(coordinator, port=0) as server,
        httpx.stream("GET", server.url + "/events/stream", timeout=DEADLINE) as response,
    ):
        lines = response.iter_lines()
        read_events(lines, 1)
        began = time.monotonic()
        server.close()
        assert [line for line in lines if line] == [] and time.monotonic() - began < 60.0
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/healthz", timeout=DEADLINE)


def test_token_is_required_except_for_the_page_and_healthz(coordinator, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    guarded = [("GET", path) for path in ("/status", "/events", "/events/stream", "/metrics", "/docs", "/")]
    guarded += [("POST", path) for path in ("/pause", "/resume", "/scale", "/stop", "/evaluate", "/restore")]
    with (
        serve_control(coordinator, port=0, token_file=str(tmp_path / "token")) as server,
        httpx.Client(base_url=server.url, timeout=DEADLINE) as http,
    ):
        for method, path in guarded:
            error = error_of(http.request(method, path), 401)
            assert error["type"] == "unauthorized" and "--token-file" in error["message"]
        error_of(http.get("/status", headers={"Authorization": "Bearer wrong"}), 401)
        assert http.get("/healthz").status_code == 200
        page = http.get("/", headers={"Accept": "text/html"})
        assert page.headers["content-type"] == "text/html; charset=utf-8" and "CartPole" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert http.get("/status", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert coordinator.calls == []


def test_address_other_than_loopback_requires_a_token(coordinator):
    with pytest.raises(UsageError, match="--token-file"), serve_control(coordinator, host="0.0.0.0", port=0):
        pass


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}])
def test_requests_from_other_origins_are_refused(shared, headers):
    coordinator, http = shared
    for method, path in (("POST", "/pause"), ("GET", "/status"), ("GET", "/events/stream"), ("GET", "/")):
        assert error_of(http.request(method, path, headers=headers), 403)["type"] == "forbidden"
    assert coordinator.calls == []


def test_requests_from_the_page_of_the_service_are_accepted(server, coordinator, http):
    assert http.post("/pause", headers={"Origin": server.url}).status_code == 200
    assert coordinator.calls == [("pause",)]


def test_metrics_endpoint_describes_the_job(coordinator, http):
    coordinator.workers[2]["state"] = "SUSPECT"
    lines = http.get("/metrics").text.splitlines()
    for line in (
        "rlframe_coordinator_up 1.0",
        "rlframe_coordinator_env_steps_total 24000.0",
        "rlframe_coordinator_staleness_versions 1.5",
        'rlframe_coordinator_job_state{state="RUNNING"} 1.0',
        'rlframe_coordinator_job_state{state="PAUSED"} 0.0',
        'rlframe_coordinator_workers{role="collector",state="BUSY"} 1.0',
        'rlframe_coordinator_workers{role="collector",state="SUSPECT"} 1.0',
        'rlframe_coordinator_batches{count="dropped"} 3.0',
    ):
        assert line in lines


def test_unknown_path_and_method_give_typed_errors(shared):
    http = shared[1]
    assert error_of(http.get("/nothing"), 404)["type"] == "not_found"
    assert error_of(http.get("/pause"), 405)["type"] == "method_not_allowed"
