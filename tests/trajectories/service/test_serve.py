"""Tests of the command `rlframe serve trajectories`: its output, its exit status, and the data that survives."""

from __future__ import annotations

import contextlib
import signal
import socket

import httpx
import pytest

from rlframe.cli import main
from tests.small_disk import small_disk
from tests.trajectories.api import Api, group
from tests.trajectories.redis_server import running_redis
from tests.trajectories.serving import outer_address, running_service, under_uvicorn
from tests.waiting import wait_until

__all__ = ["small_disk"]
DEADLINE = 60.0


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command, checks that it exits with a one-line error, and returns the error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        assert main(["serve", *arguments]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error and error.count("\n") == 1
        return error

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.system)])
def test_service_prints_its_address_and_answers_waiting_requests_after_signal(tmp_path, number):
    with running_service(tmp_path) as service:
        assert service.url in service.printed
        assert "survives" in service.printed
        with httpx.Client(base_url=service.url, timeout=DEADLINE) as client:
            api = Api(client).started()
            with socket.create_connection(("127.0.0.1", client.base_url.port), DEADLINE) as waiting:
                waiting.sendall(b"GET /batch?wait=50 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                api.send(1)
                # When this request is answered, the service has also read the request that waits.
                httpx.get(f"{service.url}/status", timeout=DEADLINE)
                assert service.stop(number) == 0
                assert b'{"batch":null}' in waiting.recv(4096)
        assert service.log.read_text() == ""
        service.start()
        assert httpx.get(f"{service.url}/status", timeout=DEADLINE).json()["queue_size"] == 1


@pytest.mark.system
def test_acknowledged_data_survives_kill_9(tmp_path):
    with running_service(tmp_path) as service:
        with httpx.Client(base_url=service.url, timeout=DEADLINE) as client:
            api = Api(client).started()
            env = api.join()
            api.send(1, 2, 3, 4, 5, env_id=0)
            leased = api.get("/batch", params={"lease": 1000, "consumer": "a", "request": "1"}).json()
            assert api.marks() == [3, 4]
        service.restart()
        with httpx.Client(base_url=service.url, timeout=DEADLINE) as client:
            api = Api(client)
            assert api.get("/batch", params={"lease": 1000, "consumer": "a", "request": "1"}).json() == leased
            assert api.post(f"/batch/{leased['batch_id']}/ack").json() == {"status": "success"}
            status = api.get("/status").json()
            assert (status["current_step"], status["queue_size"], status["leased"]) == (5, 1, 0)
            assert api.join(resume_token=env["resume_token"])["wandb_name"] == "env_0"
            assert api.join()["wandb_name"] == "env_1"
            api.send(6)
            assert api.marks() == [5, 6]


@pytest.mark.system
def test_service_prints_stored_runs_at_start_and_option_fresh_resets_them(tmp_path):
    with running_service(tmp_path) as service:
        assert "Found" not in service.printed
        with httpx.Client(base_url=service.url, timeout=DEADLINE) as client:
            Api(client).started()
            Api(client).send(1, 2, 3)
            assert Api(client).marks() == [1, 2]
        service.kill()
    with running_service(tmp_path) as service:
        found = "Found in the store: run 'default' at step 4, with 1 groups. Start with --fresh to reset it."
        assert service.printed.splitlines()[2:] == [found]
        service.kill()
    with (
        running_service(tmp_path, "--fresh") as service,
        httpx.Client(base_url=service.url, timeout=DEADLINE) as client,
    ):
        assert Api(client).get("/info").json()["batch_size"] == -1
        status = Api(client).get("/status").json()
        assert (status["current_step"], status["queue_size"], status["stored_bytes"]) == (0, 0, 0)


@pytest.mark.system
def test_full_disk_accepts_groups_again_after_batches_are_taken(tmp_path, small_disk):
    """The file system has 16 MB. The store reserves half of the space for commands."""
    large = [[number] * 50_000 for number in range(2)]  # The group has 400 kB as JSON.
    sent = {"tokens": large, "masks": large, "scores": [0.0, 1.0]}
    with (
        running_service(tmp_path, "--store", f"sqlite:{small_disk.path}/queue.db") as service,
        httpx.Client(base_url=service.url, timeout=DEADLINE) as client,
    ):
        api = Api(client).started(batch_size=2)
        env_id = api.join()["env_id"]
        for _ in range(2):  # The second iteration needs the space that the first iteration freed.
            held, count = [], 0
            while (answer := api.post("/scored_data", sent)).status_code == 200:
                count += 1
                held.append(api.get("/status-env", params={"env_id": env_id}).json()["hold"])
            assert (answer.status_code, answer.headers["retry-after"], count > 10) == (503, "1", True)
            assert f"The disk of {small_disk.path}/queue.db-payloads has" in answer.json()["error"]
            assert api.post("/scored_data_list", [sent]).status_code == 503
            assert (held[0], held[-1]) == (False, True)
            for path in ("/pause", "/resume") * 20:
                assert api.post(path).status_code == 200
            assert api.join()["status"] == "success"
            for _ in range(count):
                batch = api.get("/batch", params={"lease": 60}).json()
                assert [item["tokens"] for item in batch["batch"]] == [large]
                assert api.post(f"/batch/{batch['batch_id']}/ack").json() == {"status": "success"}
            wait_until(lambda: api.post("/scored_data", sent).status_code == 200)
            assert api.get("/batch").json()["batch"] is not None
        assert service.stop() == 0


@pytest.mark.system
def test_two_services_share_redis_and_stop_when_redis_loses_data(tmp_path):
    folders = [tmp_path / name for name in ("redis", "one", "other")]
    for folder in folders:
        folder.mkdir()
    with (
        running_redis(folders[0]) as redis_server,
        running_service(folders[1], "--store", redis_server.url) as one,
        running_service(folders[2], "--store", redis_server.url) as other,
        httpx.Client(base_url=one.url, timeout=DEADLINE) as to_one,
        httpx.Client(base_url=other.url, timeout=DEADLINE) as to_other,
    ):
        Api(to_one).started()
        wait_until(lambda: Api(to_other).get("/info").json()["batch_size"] == 4)
        Api(to_one).send(1)
        Api(to_other).send(2)
        assert Api(to_other).marks(wait=50) == [1, 2]
        assert one.stop() == 0
        with socket.create_connection(("127.0.0.1", redis_server.port), DEADLINE) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            assert connection.recv(100).startswith(b"+OK")
        with contextlib.suppress(httpx.TransportError):
            assert Api(to_other).post("/pause").status_code == 503
        assert other.process.wait(DEADLINE) == 1
        output = other.log.read_text()
        assert "lost records" in output and "Traceback" not in output


FACTORY = ["--factory", "rlframe.trajectories.service.app:app_from_environment"]


@pytest.mark.parametrize("app", [["rlframe.trajectories.server:app"], pytest.param(FACTORY, marks=pytest.mark.system)])
def test_uvicorn_settings_come_from_environment_variables(tmp_path, app):
    with under_uvicorn(tmp_path, app=app, store=f"sqlite:{tmp_path}/mine.db") as (port, _):
        answer = httpx.post(f"http://127.0.0.1:{port}/scored_data", json=group(), timeout=DEADLINE)
        assert answer.json() == {"status": "received"}
        assert (tmp_path / "mine.db").exists()


@pytest.mark.system
def test_uvicorn_on_all_interfaces_requires_token_from_other_machines(tmp_path):
    with under_uvicorn(tmp_path, "--host", "0.0.0.0", store="memory") as (port, _):
        assert httpx.get(f"http://127.0.0.1:{port}/status", timeout=DEADLINE).status_code == 200
        refused = httpx.get(f"http://{outer_address()}:{port}/reset_data", timeout=DEADLINE)
        assert refused.status_code == 403 and "_TOKEN_FILE" in refused.json()["detail"]
        marked = {"Sec-Fetch-Site": "cross-site"}
        assert httpx.get(f"http://127.0.0.1:{port}/reset_data", headers=marked, timeout=DEADLINE).status_code == 403


@pytest.mark.system
def test_uvicorn_with_no_token_answers_other_machines(tmp_path):
    settings = {"store": "memory", "no_token": "true", "allowed_hosts": "rollouts.example"}
    with under_uvicorn(tmp_path, "--host", "0.0.0.0", **settings) as (port, output):
        assert "every client that reaches this service, from any machine, can read, send and erase experience" in output
        url = f"http://{outer_address()}:{port}/status"
        for host, status in (("rollout-server", 200), ("rollouts.example", 200), ("evil.example", 403)):
            assert httpx.get(url, headers={"Host": host}, timeout=DEADLINE).status_code == status


def test_port_in_use_is_one_line_error(refusal):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"Port {port} of 127.0.0.1 is in use" in refusal("trajectories", "--port", port)


def test_invalid_options_are_one_line_errors(refusal):
    output = refusal("trajectories", "--port", "0", "--store", "sqlite:no/such/folder/x.db")
    assert "its directory does not exist" in output
    assert "Did you mean 'trajectories'?" in refusal("trajectory")
    assert "cannot be read" in refusal("trajectories", "--token-file", "nothing")


def test_service_on_all_interfaces_requires_token_or_option_no_token(tmp_path, refusal):
    output = refusal("trajectories", "--host", "0.0.0.0", "--port", "0")
    assert "--token-file" in output and "--no-token" in output
    arguments = (
        "--host",
        "0.0.0.0",
        "--store",
        "memory",
        "--no-token",
        "--allowed-host",
        "a.b",
        "--allowed-host",
        "c.d",
    )
    with running_service(tmp_path, *arguments) as service:
        for host, status in (("a.b", 200), ("c.d:80", 200), ("e.f", 403)):
            assert httpx.get(f"{service.url}/status", headers={"Host": host}, timeout=DEADLINE).status_code == status
        assert service.stop() == 0
        output = service.log.read_text()
        assert "--no-token: every client that reaches this service" in output and output.count("\n") == 1
