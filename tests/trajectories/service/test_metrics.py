"""Tests of the metrics of a real service. Prometheus's own parser reads them."""

from __future__ import annotations

import pathlib

import httpx
import pytest

from tests.extras import needs

needs("trajectories")
from prometheus_client.parser import text_string_to_metric_families

from rlframe.trajectories.service.endpoints.live import PREFIX
from tests.trajectories.api import Api, group
from tests.trajectories.serving import running_service


class Scraped:
    """The metric samples from one request to /metrics."""

    def __init__(self, client: httpx.Client, **headers: str) -> None:
        answer = client.get("/metrics", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(answer.text))
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        self.samples = [sample for family in families for sample in family.samples]

    def of_run(self, run: str) -> dict[str, float]:
        found = (sample for sample in self.samples if sample.labels.get("run") == run)
        return {sample.name.removeprefix(PREFIX): sample.value for sample in found}

    def value(self, name: str, **labels: str) -> float | None:
        return next((one.value for one in self.samples if one.name == name and one.labels == labels), None)

    def requests(self, method: str, endpoint: str, status: int) -> float | None:
        labels = {"method": method, "endpoint": endpoint, "status": str(status)}
        return self.value(f"{PREFIX}request_duration_seconds_count", **labels)


def test_metrics_describe_queue_of_each_run(tmp_path: pathlib.Path) -> None:
    arguments = ("--store", "memory", "--max-queue-mb", "64")
    with running_service(tmp_path, *arguments) as service, httpx.Client(base_url=service.url, timeout=60.0) as client:
        api = Api(client).started(max_staleness=3)
        env = api.join(group_size=4)["env_id"]
        api.join()
        api.post("/policy-version", {"policy_version": 5})
        for _ in range(2):
            key = {"Idempotency-Key": "once"}
            api.post("/scored_data", group(4, env_id=env, policy_version=4), headers=key)
        assert api.post("/scored_data", group(4, env_id=env, policy_version=0)).status_code == 409
        for one in (group(4, env_id=env, policy_version=3), group(4), group(3)):
            assert api.post("/scored_data", one).json() == {"status": "received"}
        for params in ({"lease": 60}, {}):
            assert len(api.get("/batch", params=params).json()["batch"]) == 1
        api.post("/pause")
        Api(client, "other").started()
        scraped = Scraped(client)

    run = scraped.of_run("default")
    expected = {
        "groups_received_total": 4,
        "sequences_received_total": 15,
        "tokens_received_total": 36,
        "groups_served_total": 2,
        "sequences_served_total": 8,
        "batches_served_total": 2,
        "batches_out": 1,
        "groups_duplicate_total": 1,
        "groups_refused_total": 1,
        "groups_discarded_total": 0,
        "batches_redelivered_total": 0,
        "batches_returned": 0,
        "batches_kept": 0,
        "leased_groups": 1,
        "buffered_groups": 0,
        "queue_groups": 2,
        "queue_sequences": 7,
        "set_aside_groups": 1,
        "step": 5,
        "policy_version": 5,
        "paused": 1,
        "staleness_versions_count": 2,
        "staleness_versions_sum": 3,
        "staleness_versions_largest": 2,
        "envs_live": 2,
        "envs_registered": 2,
    }
    assert {name: run.get(name) for name in expected} == expected
    assert run["run_stored_bytes"] > 0
    assert run["run_stored_bytes"] == scraped.value(f"{PREFIX}stored_bytes")
    assert scraped.value(f"{PREFIX}stored_bytes_limit") == 64 << 20
    assert scraped.value(f"{PREFIX}store_failed") == 0
    assert scraped.value("process_resident_memory_bytes") > 1 << 20
    other = scraped.of_run("other")
    assert other["groups_received_total"] == 0 and other["paused"] == 0
    assert "policy_version" not in other  # The trainer of this run has set no policy version.


def test_requests_are_counted_per_endpoint_and_all_unknown_paths_have_one_counter(tmp_path: pathlib.Path) -> None:
    with (
        running_service(tmp_path, "--store", "memory") as service,
        httpx.Client(base_url=service.url, timeout=60.0) as client,
    ):
        for path in ("/status", "/runs/a/status", "/runs/b/status", "/nothing", "/else", "/status-env?env_id=x"):
            client.get(path)
        assert client.post("/status").status_code == 405
        scraped, again = Scraped(client), Scraped(client)
    assert scraped.requests("GET", "/status", 200) == 3
    assert scraped.requests("GET", "other", 404) == 2
    assert scraped.requests("GET", "/status-env", 422) == 1
    assert scraped.requests("POST", "/status", 405) == 1
    assert scraped.requests("GET", "/metrics", 200) is None and again.requests("GET", "/metrics", 200) == 1


@pytest.mark.system
def test_metrics_require_token(tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    arguments = ("--store", "memory", "--token-file", str(tmp_path / "token"))
    with running_service(tmp_path, *arguments) as service, httpx.Client(base_url=service.url, timeout=60.0) as client:
        assert client.get("/metrics").status_code == 401
        scraped = Scraped(client, Authorization="Bearer secret")
    assert scraped.requests("GET", "other", 401) == 1


@pytest.mark.system
def test_counters_survive_restart(tmp_path: pathlib.Path) -> None:
    with running_service(tmp_path) as service:
        with httpx.Client(base_url=service.url, timeout=60.0) as client:
            api = Api(client).started()
            api.send(1, 2, 3, sequences=4)
            assert api.marks() == [1]
        service.restart()
        with httpx.Client(base_url=service.url, timeout=60.0) as client:
            run = Scraped(client).of_run("default")
    assert (run["groups_received_total"], run["groups_served_total"], run["queue_groups"]) == (3, 1, 2)
