"""Check that the trajectory service answers requests as its design documents show. It stores its data in SQLite."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import httpx
import pytest

from rlframe.errors import UnavailableError, UsageError
from rlframe.trajectories import TrajectoryClient
from tests.trajectories.serving import DEADLINE, ROOT, outer_address, running_service, under_uvicorn

REGISTRATION = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 4,
    "max_token_len": 512,
    "checkpoint_dir": "/shared/checkpoints",
    "save_checkpoint_interval": 10,
    "starting_step": 0,
    "num_steps": 100,
}
REGISTER_ENV = {
    "max_token_length": 512,
    "desired_name": "gsm8k",
    "weight": 1.0,
}
SCORED_DATA = {
    "tokens": [[1, 2, 3], [1, 2, 4]],
    "masks": [[-100, 2, 3], [-100, 2, 4]],
    "scores": [1.0, 0.0],
    "ref_logprobs": None,
    "overrides": None,
    "group_overrides": None,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with running_service(tmp_path_factory.mktemp("design")) as service:
        yield service


@pytest.fixture
def api(service):
    with httpx.Client(base_url=service.url, timeout=60) as client:
        answer = client.get("/reset_data")
        assert (answer.status_code, answer.text) == (200, "Reset successful")
        yield client


def test_answers_before_a_trainer_registers(api):
    assert "message" in api.get("/").json()
    assert api.get("/wandb_info").json() == {"group": None, "project": None}
    assert api.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    batch = api.get("/batch").json()
    assert (batch["status"], batch["batch"]) == ("error", None)
    status = api.get("/status").json()
    assert (status["current_step"], status["queue_size"]) == (0, 0)


def test_common_workflow_of_a_trainer_and_a_rollout_handler(api):
    uuid = api.post("/register", json=REGISTRATION).json()["uuid"]
    assert isinstance(uuid, int)
    assert api.get("/wandb_info").json() == {"group": "group", "project": "project"}
    assert api.get("/info").json() == {"batch_size": 4, "max_token_len": 512}
    assert api.get("/batch").json()["batch"] is None  # the trainer has no batch yet

    env = api.post("/register-env", json=REGISTER_ENV).json()
    assert env["status"] == "success" and isinstance(env["env_id"], int)
    assert env["wandb_name"].startswith("gsm8k")
    assert (env["checkpoint_dir"], env["starting_step"]) == ("/shared/checkpoints", 0)
    assert (env["checkpoint_interval"], env["num_steps"]) == (10, 100)

    assert api.post("/scored_data", json=SCORED_DATA).json() == {"status": "received"}
    assert api.get("/batch").json()["batch"] is None  # two sequences are queued, but a batch needs four
    answer = api.post("/scored_data_list", json=[SCORED_DATA]).json()
    assert (answer["status"], answer["groups_processed"]) == ("received", 1)
    latest = api.get("/latest_example").json()
    assert (latest["tokens"], latest["scores"]) == (SCORED_DATA["tokens"], SCORED_DATA["scores"])

    status = api.request("GET", "/status-env", json={"env_id": env["env_id"]}).json()
    # `queue_size` is a number of sequences, not of groups, because this environment has not sent a group yet.
    assert status["current_step"] == 0 and status["queue_size"] == 4
    assert status["env_weight"] == pytest.approx(1.0)
    assert status.items() <= api.get("/status-env", params={"env_id": env["env_id"]}).json().items()

    batch = api.get("/batch").json()["batch"]
    assert [item["tokens"] for item in batch] == [SCORED_DATA["tokens"]] * 2
    assert [item["masks"] for item in batch] == [SCORED_DATA["masks"]] * 2
    assert api.get("/status").json()["current_step"] == 1

    assert api.post("/disconnect-env", json={"env_id": env["env_id"]}).json() == {"status": "success"}
    failure = api.post("/disconnect-env", json={"env_id": 10_000}).json()
    assert failure["status"] == "failure" and "error" in failure


@pytest.mark.parametrize("steps_left, pauses", [(97, True), (96, False), (10, False)])
def test_rollout_handler_does_not_quit_while_the_service_is_paused(api, steps_left, pauses):
    """atroposlib's client quits if `current_step + Q * group_size // batch_size` exceeds its number of steps."""
    api.post("/register", json={**REGISTRATION, "batch_size": 64, "starting_step": 7, "num_steps": 7 + steps_left})
    api.get("/batch")
    env_id = api.post("/register-env", json={**REGISTER_ENV, "group_size": 32}).json()["env_id"]
    api.post("/pause")
    queue_size = api.request("GET", "/status-env", json={"env_id": env_id}).json()["queue_size"]
    assert (queue_size > 3 * 64) == pauses
    assert 3 < queue_size * 32 // 64 <= steps_left  # under atroposlib's rule, a client would always pause here


def test_rollout_handler_pauses_above_three_queued_batches_and_continues_below(api):
    """Run the loop in the design document. `queue_size` is a number of groups with this environment's group size."""
    api.post("/register", json=REGISTRATION)
    api.get("/batch")
    env_id = api.post("/register-env", json=REGISTER_ENV).json()["env_id"]
    sent, is_paused = 0, False
    for _ in range(40):
        if not is_paused:
            assert api.post("/scored_data", json={**SCORED_DATA, "env_id": env_id}).json()["status"] == "received"
            sent += 1
        queue_size = api.request("GET", "/status-env", json={"env_id": env_id}).json()["queue_size"]
        is_paused = queue_size > 3 * REGISTRATION["batch_size"]
    assert is_paused and sent == 3 * 4 + 1
    while is_paused:
        assert api.get("/batch").json()["batch"] is not None
        queue_size = api.request("GET", "/status-env", json={"env_id": env_id}).json()["queue_size"]
        is_paused = queue_size > 3 * REGISTRATION["batch_size"]
    assert queue_size == 11


def test_plain_http_example_of_a_trainer_and_a_rollout_handler_runs(service, api):
    example = [sys.executable, str(ROOT / "examples/llm/plain_http.py"), service.url]
    done = subprocess.run(example, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"step {step}: 4 sequences, mean score 0.50" for step in range(3)]
    assert done.stderr == "counting_0 logs to group 'group' of project 'project'\n"  # /wandb_info contains these names
    assert api.get("/report").json()["envs"][0]["connected"] is False


def test_app_runs_under_uvicorn_as_documented(tmp_path):
    with under_uvicorn(tmp_path, "--host", "0.0.0.0", store="memory") as (port, _):
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(url, timeout=60).json() == {"message": "rlframe trajectories"}
        assert httpx.post(f"{url}/register", json=REGISTRATION, timeout=60).json()["uuid"] > 0
        # The server sees this request as a request from another machine.
        outside = httpx.get(f"http://{outer_address()}:{port}/reset_data", timeout=60)
        assert outside.status_code == 403 and "requires no token" in outside.json()["detail"]
        assert httpx.get(f"{url}/info", timeout=60).json()["batch_size"] == 4


@pytest.mark.system
def test_app_with_a_token_file_refuses_requests_without_the_token(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text("secret\n")
    settings = {"store": "memory", "token_file": str(token_file)}
    with under_uvicorn(tmp_path, "--host", "0.0.0.0", **settings) as (port, _):
        for host in ("127.0.0.1", outer_address()):
            url = f"http://{host}:{port}/status"
            assert httpx.get(url, timeout=60).status_code == 401
            assert httpx.get(url, headers={"Authorization": "Bearer secret"}, timeout=60).status_code == 200


def test_endpoint_page_loads_no_external_resources(api):
    answer = api.get("/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"(?:src|href)=.?(?:https?:)?//|url\(|@import|import\(", answer.text)
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert 'fetch("openapi.json")' in answer.text and "/scored_data" in api.get("/openapi.json").json()["paths"]
    assert api.get("/redoc").status_code == 404


def test_other_ranks_wait_until_rank_zero_gets_the_next_batch(service, api):
    api.post("/register", json={**REGISTRATION, "starting_step": 5})
    with TrajectoryClient(service.url) as client:
        assert client.wait_for_step(5).current_step == 5
        with pytest.raises(UnavailableError, match="step 6 did not come within 0.2 s; the run is at step 5"):
            client.wait_for_step(6, wait=0.2)
        steps = []
        rank_1 = threading.Thread(target=lambda: steps.append(client.wait_for_step(6, wait=60).current_step))
        rank_1.start()
        api.post("/scored_data_list", json=[SCORED_DATA] * 2)
        assert rank_1.is_alive()  # queued groups do not increase the step
        assert api.get("/batch").json()["batch"] is not None
        rank_1.join(60)
        assert steps == [6]


def test_each_request_in_the_sequence_diagrams_has_an_endpoint(api):
    page = (ROOT / "tests/design/README.md").read_text()
    diagrams = re.findall(r"```mermaid\nsequenceDiagram\n(.*?S: .*?)```", page, re.DOTALL)
    requests = [re.findall(r"(\w)->>S: (GET|POST) (/[\w-]*)", diagram) for diagram in diagrams]
    paths = api.get("/openapi.json").json()["paths"]
    assert all(method.lower() in paths[path] for diagram in requests for _, method, path in diagram)
    (ranks,) = (diagram for diagram in requests if any(asks == "R" for asks, *_ in diagram))
    assert ranks == [("R", "POST", "/register"), ("R", "GET", "/status")]


def test_waiting_rank_raises_an_error_if_the_run_is_reset(service, api):
    api.post("/register", json={**REGISTRATION, "starting_step": 5})

    class ResetsRun(TrajectoryClient):
        async def _pause(self, seconds):
            api.post("/register", json={**REGISTRATION, "starting_step": 0})

    with ResetsRun(service.url) as client, pytest.raises(UsageError, match="was at step 5, and is at step 0"):
        client.wait_for_step(6, wait=60)


def test_both_ranks_of_the_example_train_on_the_same_batches(service, api):
    example = [sys.executable, str(ROOT / "examples/llm/ranks.py"), service.url]
    done = subprocess.run(example, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"rank {rank}, step {step}: 2 sequences" for rank in range(2) for step in range(1, 4)]


@pytest.mark.system
def test_example_with_two_ranks_fails_if_rank_zero_is_killed(service, api, tmp_path):
    text = (ROOT / "examples/llm/ranks.py").read_text()
    broadcast = "            for other in others:"
    assert broadcast in text
    killed = broadcast.replace("for", "__import__('os').kill(__import__('os').getpid(), 9)\n            for")
    (tmp_path / "ranks.py").write_text(text.replace(broadcast, killed))
    example = [sys.executable, str(tmp_path / "ranks.py"), service.url]
    done = subprocess.run(example, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1 and "EOFError" in done.stderr, done.stderr
