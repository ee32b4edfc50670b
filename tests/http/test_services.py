"""Test who can reach the trajectory service, the policy server and a run's control service, with real requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from tests.extras import needs

needs("trajectories", "envs")

from rlframe.errors import UsageError
from rlframe.language.server import PolicyServerConfig
from rlframe.trajectories.config import Settings
from tests.http.services import COMPLETION, Target, control, policy, trajectories
from tests.trajectories.serving import outer_address

DEADLINE = 60.0  # seconds, which is long enough on a busy machine
KINDS = {"trajectories": trajectories, "policy": policy, "control": control}


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(open_one()) for name, open_one in KINDS.items()}


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, targets: dict[str, Target]) -> Target:
    return targets[request.param]


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_requests_from_pages_of_other_sites_are_refused(target, headers):
    before = target.state()
    for method, path, body in [*target.reads, *target.changes]:
        answer = httpx.request(method, target.url + path, json=body, headers=headers, timeout=DEADLINE)
        assert answer.status_code == 403, (method, path, answer.text)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert target.state() == before


def test_service_answers_requests_from_programs_and_from_its_own_pages(target):
    own = {"Origin": target.url, "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, own, {"Sec-Fetch-Site": "none"}, {"Host": f"localhost:{target.port}"}):
        for method, path, _ in target.reads:
            answer = httpx.request(method, target.url + path, headers=headers, timeout=DEADLINE)
            assert answer.status_code == 200, (path, headers, answer.text)


@pytest.mark.parametrize("open_one", [trajectories, control])
def test_link_on_another_site_can_open_the_live_page(open_one, targets):
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    url = targets[open_one.__name__].url
    page = httpx.get(url, headers={**link, "Accept": "text/html"}, timeout=DEADLINE)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert httpx.get(url + "/status", headers=link, timeout=DEADLINE).status_code == 403


def test_any_host_name_is_accepted_with_a_token(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    token = {"Authorization": "Bearer secret"}
    with control(token_file=str(tmp_path / "token")) as target:
        assert (
            httpx.get(target.url + "/status", headers={**token, "Host": "train.example"}, timeout=DEADLINE).status_code
            == 200
        )
        assert httpx.get(target.url + "/status", headers={"Host": "train.example"}, timeout=DEADLINE).status_code == 401
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert httpx.post(target.url + "/pause", headers={**token, **headers}, timeout=DEADLINE).status_code == 403
        assert target.state() == []


def test_no_token_option_lets_other_machines_reach_the_trajectory_service():
    address = outer_address()
    with trajectories("0.0.0.0", no_token=True, allowed_hosts=("rollouts.example",)) as target:
        outer = f"http://{address}:{target.port}"
        for host in (f"{address}:{target.port}", f"rollout_server:{target.port}", "rollouts.example"):
            assert httpx.get(outer + "/status", headers={"Host": host}, timeout=DEADLINE).json()["queue_size"] == 2
        assert (
            "--allowed-host"
            in httpx.get(outer + "/status", headers={"Host": "evil.example"}, timeout=DEADLINE).json()["detail"]
        )


@pytest.mark.system
def test_no_token_option_lets_other_machines_reach_the_policy_server():
    with policy(host="0.0.0.0", no_token=True) as target:
        outer = f"http://{outer_address()}:{target.port}/v1/completions"
        answer = httpx.post(outer, json=COMPLETION, headers={"Host": "policy:8001"}, timeout=DEADLINE)
        assert answer.status_code == 200


def test_listening_at_all_addresses_requires_a_token_or_the_no_token_option(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    message = "Other machines can reach 0.0.0.0, and every client that reaches this service can .*--no-token"
    with pytest.raises(UsageError, match=message):
        Settings("0.0.0.0", store="memory")
    with pytest.raises(UsageError, match=message):
        PolicyServerConfig(host="0.0.0.0")
    with pytest.raises(UsageError, match="--token-file, or listen at 127.0.0.1"), control(host="0.0.0.0"):
        pass
    for config_class in (PolicyServerConfig, Settings):
        with pytest.raises(UsageError, match="contradict"):
            config_class(token_file=str(tmp_path / "token"), no_token=True)
