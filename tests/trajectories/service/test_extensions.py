"""Tests of the service's optional features that atroposlib's server lacks, with the real command and SQLite."""

from __future__ import annotations

import gzip
import json
import threading
import time

import httpx
import msgspec
import numpy as np
import pytest
import zstandard

from tests.trajectories.api import Api, fresh_name, group, marks_of
from tests.trajectories.serving import running_service
from tests.waiting import wait_until

MSGPACK = {"Content-Type": "application/msgpack"}
DEADLINE = 60.0


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extensions")
    with running_service(folder) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


@pytest.fixture
def api(client):
    return Api(client, fresh_name()).started()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Run a service that has low limits, requires a token, and refuses resets."""
    folder = tmp_path_factory.mktemp("narrow")
    (folder / "token").write_text("secret\n")
    arguments = ("--max-body-mb", "1", "--max-queue-mb", "2", "--no-reset", "--token-file", "token")
    with running_service(folder, *arguments) as service:
        headers = {"Authorization": "Bearer secret"}
        with httpx.Client(base_url=service.url, timeout=60, headers=headers) as client:
            yield client


# Tests of repeated requests


def test_group_with_repeated_key_is_added_once(api):
    key = {"Idempotency-Key": "a"}
    first = api.post("/scored_data", group(mark=1), headers=key)
    again = api.post("/scored_data", group(mark=2), headers=key)
    assert first.json() == again.json() == {"status": "received"}
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert api.get("/status").json()["queue_size"] == 1
    assert api.post("/scored_data", group(), headers={"Idempotency-Key": "x" * 201}).status_code == 422


def test_each_group_of_list_has_its_own_key(api):
    key = {"Idempotency-Key": "a"}
    groups = [group(mark=1), group(mark=2)]
    first = api.post("/scored_data_list", groups[:1], headers=key)
    again = api.post("/scored_data_list", groups, headers=key)
    assert (first.json()["groups_processed"], again.json()["groups_processed"]) == (1, 2)
    assert "Idempotent-Replayed" not in again.headers
    assert api.post("/scored_data_list", groups, headers=key).headers["Idempotent-Replayed"] == "true"
    assert api.marks() == [1, 2]


def test_same_key_or_resume_token_gives_same_environment(api):
    fields = {"max_token_length": 9, "desired_name": "env", "weight": 1.0, "group_size": 2}
    key = {"Idempotency-Key": "a"}
    first = api.post("/register-env", fields, headers=key)
    again = api.post("/register-env", fields, headers=key)
    assert first.json() == again.json()
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    other = api.join()
    assert (other["env_id"], other["wandb_name"]) == (1, "env_1")
    back = api.join(resume_token=other["resume_token"], group_size=3)
    assert (back["env_id"], back["wandb_name"], back["resume_token"]) == (1, "env_1", other["resume_token"])
    assert api.join(resume_token="of nobody")["env_id"] == 2


# Tests of leases


def test_leased_batch_is_acknowledged(api):
    api.send(1, 2)
    taken = api.get("/batch", params={"lease": 100, "consumer": "a"}).json()
    assert (marks_of(taken["batch"]), taken["step"], taken["redelivered"]) == ([1, 2], 3, False)
    assert api.get("/status").json()["leased"] == 2
    path = f"/batch/{taken['batch_id']}"
    assert api.post(f"{path}/nack", params={"consumer": "b"}).status_code == 404
    assert api.post(f"{path}/ack").json() == {"status": "success"}
    again = api.post(f"{path}/ack")
    assert (again.status_code, again.json()["status"]) == (404, "failure")
    assert api.get("/batch", params={"lease": 1}).json() == {
        "batch": None, "batch_id": None, "step": None, "redelivered": None
    }  # fmt: skip


def test_returned_or_expired_batch_is_redelivered(api):
    api.send(1, 2)
    taken = api.get("/batch", params={"lease": 100, "consumer": "a"}).json()
    assert api.post(f"/batch/{taken['batch_id']}/nack", params={"consumer": "a"}).json() == {"status": "success"}
    again = api.get("/batch", params={"lease": 0.01, "consumer": "b"}).json()
    assert (again["batch_id"], again["redelivered"], again["step"]) == (taken["batch_id"], True, 3)
    third = api.get("/batch", params={"wait": 30, "consumer": "c"}).json()
    assert (third["batch_id"], third["redelivered"], marks_of(third["batch"])) == (taken["batch_id"], True, [1, 2])


def test_only_owner_can_renew_lease(api):
    api.send(1, 2)
    batch_id = api.get("/batch", params={"lease": 100, "consumer": "a"}).json()["batch_id"]
    renew = f"/batch/{batch_id}/renew"
    assert api.post(renew, params={"lease": 0.01, "consumer": "b"}).status_code == 404
    assert api.post(renew, params={"lease": 0}).status_code == api.post(renew).status_code == 422
    assert api.post(renew, params={"lease": 0.01, "consumer": "a"}).json() == {"status": "success"}
    again = api.get("/batch", params={"wait": 30, "lease": 100, "consumer": "b"}).json()
    assert (again["batch_id"], again["redelivered"]) == (batch_id, True)
    assert api.post(renew, params={"lease": 100, "consumer": "a"}).status_code == 404


def test_same_request_gets_same_batch(api):
    api.send(1, 2, 3, 4)
    ask = {"consumer": "a", "request": "1"}
    first = api.get("/batch", params=ask).json()
    assert api.get("/batch", params=ask).json() == first
    assert api.marks(consumer="a", request="2") == [3, 4]


# Tests of requests that wait for a batch


def test_waiting_request_is_answered_when_batch_is_ready(api):
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(api.marks(wait=50)))
    waiting.start()
    api.send(1)
    api.send(2)
    waiting.join(DEADLINE)
    assert answers == [[1, 2]]
    assert api.marks(wait=0.05) is None
    assert api.get("/batch", params={"wait": 61}).status_code == 422


def test_disconnected_waiting_request_takes_no_batch(api):
    with pytest.raises(httpx.ReadTimeout):
        api.get("/batch", params={"wait": 60}, timeout=httpx.Timeout(DEADLINE, read=0.3))
    api.send(1, 2)
    assert api.marks(wait=30) == [1, 2]


# Tests of pauses, policy versions and heartbeats


def test_pause_makes_every_environment_wait(api):
    api.join()
    assert api.post("/pause").json() == {"status": "success"}
    status = api.get("/status-env", params={"env_id": 0}).json()
    assert status["hold"] is True and status["queue_size"] > 2 * 4
    assert api.get("/status").json()["paused"] is True
    api.post("/resume")
    status = api.get("/status-env", params={"env_id": 0}).json()
    assert (status["hold"], status["queue_size"]) == (False, 0)


def test_stale_groups_and_groups_that_would_become_stale_are_refused(client):
    api = Api(client, fresh_name()).started(max_staleness=0)
    assert api.post("/policy-version", {"policy_version": 5}).json() == {"status": "success", "policy_version": 5}
    api.send(1, 2, policy_version=5)
    early = api.post("/scored_data", group(policy_version=5))
    assert (early.status_code, early.json()["status"]) == (503, "too early")
    assert int(early.headers["Retry-After"]) > 0
    old = api.post("/scored_data", group(policy_version=4))
    assert (old.status_code, old.json()["status"]) == (409, "too old")
    assert api.post("/scored_data_list", [group(policy_version=4), group()]).json() == {
        "status": "received",
        "groups_processed": 1,
        "too_old": 1,
    }
    item = api.get("/batch").json()["batch"][0]
    assert item["policy_version"] == 5


def test_stale_groups_are_discarded_if_registration_requests_it(client):
    api = Api(client, fresh_name()).started(max_staleness=1, stale="discard")
    api.send(1, 2, policy_version=1)
    api.send(3, 4, policy_version=8)
    assert api.marks(policy_version=8) == [3, 4]
    assert api.get("/status").json()["policy_version"] == 8
    assert api.get("/report").json()["discarded"] == 2


@pytest.mark.system
def test_minimum_share_depends_on_heartbeats(client):
    api = Api(client, fresh_name()).started(lapse_after=3.0)
    api.join(min_batch_allocation=0.5)
    api.send(1, 2)
    assert api.marks() is None
    assert any("minimum share" in why for why in api.get("/status").json()["waiting_for"])
    end = time.monotonic() + 3.5
    while time.monotonic() < end:  # A status request of an environment counts as its heartbeat.
        api.get("/status-env", params={"env_id": 0})
        time.sleep(0.05)
        assert api.marks() is None
    assert api.marks(wait=30) == [1, 2]
    assert not api.get("/report").json()["envs"][0]["live"]
    assert api.post("/heartbeat", {"env_id": 9}).json()["status"] == "failure"

    def is_back():
        assert api.post("/heartbeat", {"env_id": 0}).json() == {"status": "success"}
        return api.get("/report").json()["envs"][0]["live"]

    wait_until(is_back)


def test_report_has_counters(api):
    api.join()
    api.send(1, 2, 3, env_id=0)
    api.marks()
    report = api.get("/report").json()
    assert report["registration"]["batch_size"] == 4
    assert (report["batches_served"], report["sequences_served"]) == (1, 4)
    env = report["envs"][0]
    assert (env["added_groups"], env["served_groups"], env["queued_groups"]) == (3, 2, 1)


# Tests of formats


def binary(mark=1, **fields):
    tokens = np.asarray([mark, mark, mark], "<i4").tobytes()
    lengths = np.asarray([1, 2], "<i4").tobytes()
    return {"tokens": tokens, "masks": tokens, "scores": [0.5, 1.0], "lengths": lengths, **fields}


def test_binary_groups_are_served_unchanged_or_as_lists(api):
    sent = [binary(mark) for mark in (1, 2, 3)]
    body = msgspec.msgpack.encode(sent[0])
    assert api.post("/scored_data", content=body, headers=MSGPACK).json() == {"status": "received"}
    body = msgspec.msgpack.encode(sent[1:])
    assert api.post("/scored_data_list", content=body, headers=MSGPACK).json()["groups_processed"] == 2
    api.send(4)
    answer = api.get("/batch", headers={"Accept": "application/msgpack"})
    assert answer.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(answer.content) == {"batch": sent[:2]}
    third, fourth = api.get("/batch").json()["batch"]
    assert third["tokens"] == [[3], [3, 3]] and fourth["tokens"] == [[4], [4, 4]]
    assert (third["advantages"], third["scores"]) == (None, [0.5, 1.0])
    latest = api.get("/latest", params={"count": 2}).json()["groups"]
    assert marks_of(latest) == [4, 3]
    answer = api.get("/latest_example", headers={"Accept": "application/msgpack"})
    assert msgspec.msgpack.decode(answer.content)["tokens"] == [[4], [4, 4]]


def test_requests_without_groups_can_be_messagepack(api):
    body = msgspec.msgpack.encode({"policy_version": 3})
    assert api.post("/policy-version", content=body, headers=MSGPACK).json()["policy_version"] == 3
    assert api.post("/policy-version", content=b"\xc1", headers=MSGPACK).status_code == 400


@pytest.mark.parametrize("encoding, encode", [("zstd", zstandard.compress), ("gzip", gzip.compress)])
def test_compressed_bodies_are_accepted(api, encoding, encode):
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    body = encode(json.dumps(group(mark=1)).encode())
    assert api.post("/scored_data", content=body + body[:0], headers=headers).json() == {"status": "received"}
    assert api.post("/scored_data", content=b"nonsense", headers=headers).status_code == 400
    assert api.post("/scored_data", content=body[:-6], headers=headers).status_code in (400, 422)
    assert api.post("/scored_data", content=body, headers={"Content-Encoding": "br"}).status_code == 415


# Tests of limits


@pytest.mark.parametrize("encoding, encode", [("zstd", zstandard.compress), ("gzip", gzip.compress)])
def test_decompression_bomb_is_refused(narrow, encoding, encode):
    bomb = encode(bytes(50 << 20))
    assert len(bomb) < 1 << 20
    answer = narrow.post("/scored_data", content=bomb, headers={"Content-Encoding": encoding})
    assert answer.status_code == 413


def test_large_body_is_refused(narrow):
    assert narrow.post("/scored_data", content=bytes((1 << 20) + 1)).status_code == 413
    for megabytes in (2, 15):  # A client can send much data before it reads the answer.
        chunks = (bytes(1 << 16) for _ in range(16 * megabytes))
        answer = narrow.post("/scored_data", content=chunks)
        assert (answer.status_code, "at most 1 MB" in answer.json()["detail"]) == (413, True)


def test_environments_wait_when_queue_is_nearly_full(narrow):
    api = Api(narrow, fresh_name()).started(batch_size=1000)
    api.join()
    long = {"tokens": [[7] * 20_000] * 2, "masks": [[7] * 20_000] * 2}
    answers, held = [], []
    while not answers or answers[-1].status_code == 200:
        held.append(api.get("/status-env", params={"env_id": 0}).json()["hold"])
        answers.append(api.post("/scored_data", group(**long)))
    assert held[0] is False and held[-1] is True
    full = answers[-1]
    assert (full.status_code, full.json()["status"]) == (503, "full")
    assert int(full.headers["Retry-After"]) > 0
    kept = api.get("/status").json()
    assert kept["queue_size"] == len(answers) - 1
    assert kept["stored_bytes"] <= 2 << 20


def test_resets_can_be_turned_off(narrow):
    api = Api(narrow, fresh_name()).started()
    assert api.get("/reset_data").status_code == api.post("/reset_data").status_code == 403
    assert api.get("/info").json()["batch_size"] == 4


@pytest.mark.parametrize("token", [None, "Bearer wrong", "Basic secret", "secret", "Bearer é"])
@pytest.mark.parametrize("path", ["/", "/batch", "/docs", "/nowhere"])
def test_requests_without_token_are_refused(narrow, token, path):
    headers = {} if token is None else {"Authorization": token.encode()}
    answer = httpx.get(str(narrow.base_url) + path, headers=headers, timeout=DEADLINE)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


def test_pages_of_other_origins_get_no_cors_headers(client):
    answer = client.get("/status", headers={"Origin": "http://elsewhere"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
