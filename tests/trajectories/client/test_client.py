"""Tests of the clients against the real service. No group or batch is lost or duplicated, even if messages are lost."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid

import numpy as np
import pytest

from rlframe.errors import PeerError, StaleGroupError, StoppedError, UnavailableError, UsageError
from rlframe.trajectories import AsyncTrajectoryClient, Group, TrajectoryClient
from rlframe.trajectories.client import base_client
from tests.trajectories.client.test_groups import FULL, a_group, assert_same_group
from tests.trajectories.flaky_proxy import flaky_proxy
from tests.trajectories.serving import DEADLINE, running_service

SETTINGS = {"batch_size": 2, "max_token_len": 64, "num_steps": 100}
ENV = {"desired_name": "env", "group_size": 2, "max_token_length": 64}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def run():
    """Return the name of a new run on the shared service."""
    return uuid.uuid4().hex


@pytest.fixture
def client(service, run):
    with TrajectoryClient(service.url, run=run, timeout=DEADLINE) as client:
        yield client


def numbered(number: int, size: int = 2, **fields) -> Group:
    """Return a group in which every score is the number."""
    return Group([[number, 1]] * size, [[-100, 1]] * size, [float(number)] * size, **fields)


def numbers_of(groups) -> list[int]:
    return [int(group.scores[0]) for group in groups]


def served(client: TrajectoryClient) -> list[int]:
    """Take all batches as a trainer does, and return the numbers of their groups in the received order."""
    numbers = []
    while (batch := client.batch()) is not None:
        numbers += numbers_of(batch.groups)
    return numbers


# Tests of what each call returns.


def test_trainer_and_environment_register(client):
    assert client.info().batch_size == -1
    with pytest.raises(UnavailableError, match="Trainer not registered"):
        client.batch()
    registered = client.register(**SETTINGS, wandb_group="g", wandb_project="p", checkpoint_dir="c")
    assert client.register(**SETTINGS, wandb_group="g", wandb_project="p", checkpoint_dir="c") == registered
    assert (client.info().batch_size, client.info().max_token_len) == (2, 64)
    assert (client.wandb_info().group, client.wandb_info().project) == ("g", "p")
    with pytest.raises(UnavailableError, match=r"'env' waited 0 s to register.*wait for trainer to start"):
        client.register_env(**ENV)
    assert client.batch() is None
    env = client.register_env(**ENV)
    assert (env.env_id, env.wandb_name, env.checkpoint_dir, env.num_steps) == (0, "env_0", "c", 100)
    assert client.register_env(**ENV).wandb_name == "env_1"
    again = client.register_env(**ENV, resume_token=env.resume_token)
    assert (again.env_id, again.wandb_name) == (0, "env_0")
    client.heartbeat(0)
    client.disconnect_env(0)
    with pytest.raises(UsageError, match="There is no environment 7"):
        client.disconnect_env(7)
    with pytest.raises(UsageError, match="There is no environment 7"):
        client.env_status(7)


@pytest.mark.parametrize("kind", [TrajectoryClient, AsyncTrajectoryClient])
def test_clients_ignore_a_proxy_of_the_environment(service, run, monkeypatch, kind):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    client = kind(service.url, run=run, timeout=DEADLINE)
    if kind is TrajectoryClient:
        with client:
            assert client.register(**SETTINGS)
        return

    async def register():
        async with client:
            assert await client.register(**SETTINGS)

    asyncio.run(register())


def test_resumed_trainer_continues_its_run_with_same_run_key(client):
    registered = client.register(**SETTINGS, run_key="one", mix="weight")
    assert client.batch() is None
    assert client.post(a_group()).status == "received"
    assert client.register(**{**SETTINGS, "num_steps": 500}, run_key="one") == registered
    assert (client.status().queue_size, client.status().epoch) == (1, 0)
    assert client.register(**SETTINGS, run_key="two") != registered
    assert (client.status().queue_size, client.status().epoch) == (0, 1)


def test_environment_waits_for_trainer(client):
    client.register(**SETTINGS)
    joined = []
    waiting = threading.Thread(target=lambda: joined.append(client.register_env(**ENV, wait=DEADLINE)))
    waiting.start()
    assert client.batch() is None
    waiting.join(DEADLINE)
    assert joined[0].wandb_name == "env_0"


@pytest.mark.parametrize("binary", [True, False])
def test_groups_are_served_unchanged(client, binary):
    client.register(**SETTINGS)
    group = a_group(**{**FULL, "env_id": None})
    assert client.post(group, binary=binary).status == "received"
    posted = client.post([numbered(1), numbered(2)], binary=binary)
    assert (posted.groups, posted.replayed) == (2, False)
    batches = [client.batch() for _ in range(3)]
    assert_same_group(batches[0].groups[0], group)
    assert numbers_of(batches[1].groups + batches[2].groups) == [1, 2]
    assert [batch.step for batch in batches] == [0, 1, 2]
    assert client.batch() is None


def test_compressed_groups_are_served_unchanged(service, run):
    with TrajectoryClient(service.url, run=run, compress=True, timeout=DEADLINE) as client:
        client.register(**{**SETTINGS, "max_token_len": 4096})
        group = Group([[5] * 4096] * 2, [[5] * 4096] * 2, [0, 1])
        client.post(group)
        assert_same_group(client.batch().groups[0], group)


def test_undersized_groups_are_buffered(client):
    client.register(**SETTINGS)
    client.batch()
    env = client.register_env(**ENV)
    posted = client.post(numbered(1, size=1, env_id=env.env_id))
    assert (posted.status, posted.buffer_size) == ("buffered", 1)
    assert client.status().buffered == 1
    client.post([numbered(2, size=1, env_id=env.env_id)])
    assert numbers_of(client.batch().groups) == [1, 2]


def test_leased_batch_is_given_back_or_acknowledged(client):
    client.register(**SETTINGS)
    client.post([numbered(1), numbered(2)])
    first = client.batch(lease=60)
    assert (numbers_of(first.groups), first.redelivered) == ([1], False)
    assert client.status().leased == 1
    assert client.nack(first.batch_id)
    again = client.batch(lease=60)
    assert (numbers_of(again.groups), again.redelivered, again.step) == ([1], True, first.step)
    assert client.renew(again.batch_id, 120.0)
    assert client.ack(again.batch_id)
    assert not client.ack(again.batch_id)
    assert not client.renew(again.batch_id, 120.0)
    assert numbers_of(client.batch(lease=60).groups) == [2]


def test_only_owner_can_give_batch_back(client):
    client.register(**SETTINGS)
    client.post(numbered(1))
    batch = client.batch(lease=60, consumer="one")
    assert not client.nack(batch.batch_id, consumer="two")
    assert client.nack(batch.batch_id, consumer="one")


def test_waiting_request_gets_new_batch(client):
    client.register(**SETTINGS)
    batches = []
    waiting = threading.Thread(target=lambda: batches.append(client.batch(wait=DEADLINE)))
    waiting.start()
    client.post(numbered(4))
    waiting.join(DEADLINE)
    assert numbers_of(batches[0].groups) == [4]


def test_batch_request_sets_policy_version(client):
    client.register(**SETTINGS)
    client.batch(policy_version=3)
    assert client.status().policy_version == 3
    client.set_policy_version(4)
    assert client.status().policy_version == 4


def test_environment_sends_nothing_during_pause(client):
    client.register(**SETTINGS)
    client.batch()
    env_id = client.register_env(**ENV).env_id
    assert not client.wait_until_wanted(env_id, 0).hold
    client.pause()
    assert client.status().paused and client.env_status(env_id).hold
    with pytest.raises(UnavailableError, match=r"environment 0 must still wait after 0 s.*hold is True"):
        client.wait_until_wanted(env_id, 10**9, wait=0)
    wanted = threading.Thread(target=client.wait_until_wanted, args=(env_id, 0), kwargs={"wait": DEADLINE})
    wanted.start()
    client.resume()
    wanted.join(DEADLINE)
    assert not wanted.is_alive()


def test_environment_sends_nothing_while_too_many_groups_wait(client):
    client.register(**SETTINGS)
    client.batch()
    env_id = client.register_env(**ENV).env_id
    client.post([numbered(number, env_id=env_id) for number in range(4)])
    assert client.wait_until_wanted(env_id, 4).queue_size == 4
    with pytest.raises(UnavailableError, match=r"4 groups wait \(at most 3 may\)"):
        client.wait_until_wanted(env_id, 3, wait=0)
    client.batch()
    assert client.wait_until_wanted(env_id, 3).queue_size == 3


def test_client_delays_groups_that_would_become_stale_in_queue(client, monkeypatch):
    monkeypatch.setattr(base_client, "_MIN_ATTEMPT", DEADLINE)
    client.register(**SETTINGS, max_staleness=1)
    client.batch(policy_version=5)
    with pytest.raises(
        StaleGroupError, match=r"POST .*/scored_data: .*refused it: .* 2 policy versions old; .*at most 1"
    ):
        client.post(numbered(1, policy_version=3))
    with pytest.raises(StaleGroupError, match="2 policy versions old"):
        client.post([numbered(1, policy_version=3)] * 2)
    # The service accepts two groups at once and the other two after retries. No group is added twice.
    groups = [numbered(number, policy_version=5) for number in range(4)]
    with pytest.raises(UnavailableError, match="2 of 4 groups were not accepted within 0.1 s"):
        client.post(groups, key="four", timeout=0.1)
    with pytest.raises(UnavailableError, match=r"POST .*/scored_data: not accepted after .*2 policy versions old"):
        client.post(numbered(9, policy_version=5), timeout=0.1)
    posted = []
    posting = threading.Thread(target=lambda: posted.append(client.post(groups, key="four", timeout=DEADLINE)))
    posting.start()
    numbers = []
    while len(numbers) < 4:
        numbers += numbers_of(client.batch(wait=DEADLINE).groups)
    posting.join(DEADLINE)
    assert (sorted(numbers), posted[0].groups) == ([0, 1, 2, 3], 4)


# Tests of errors that the client does not retry.


def test_refused_request_is_not_retried(client, service, run):
    client.register(**SETTINGS)
    with flaky_proxy(service.url) as proxy, TrajectoryClient(proxy.url, run=run) as through:
        with pytest.raises(
            UsageError, match=r"POST http.*/scored_data: .*refused it \(422\).*body.tokens: .*3 sequences"
        ):
            through.post(numbered(1, size=3))
        assert proxy.requests == [f"POST /runs/{run}/scored_data"]
        with pytest.raises(UsageError, match="min_batch_allocation"):
            through.register_env(**ENV, min_batch_allocation=2)


def test_invalid_arguments_are_refused_by_client(client):
    for url in ("localhost:8000", "ftp://host", "http://host/?run=a", "http://host#a", ""):
        with pytest.raises(UsageError, match="http://HOST:PORT"):
            TrajectoryClient(url)
    with pytest.raises(UsageError, match="A run's name"):
        TrajectoryClient("http://host", run="a/b")
    with pytest.raises(UsageError, match="wait=61"):
        client.batch(wait=61)
    with pytest.raises(UsageError, match="the list is empty"):
        client.post([])


def test_unreachable_service_raises_peer_error_by_deadline():
    with flaky_proxy("http://127.0.0.1:9") as proxy:
        url = proxy.url  # After the `with` block, no server listens at this address.
    began = time.monotonic()
    with (
        TrajectoryClient(url, timeout=0.3) as client,
        pytest.raises(PeerError, match=rf"GET {url}/status: no answer after .* attempts .*0.3 s.*ConnectError"),
    ):
        client.status()
    assert time.monotonic() - began < DEADLINE


def test_missing_answer_raises_peer_error_by_deadline(service, run):
    with flaky_proxy(service.url) as proxy, TrajectoryClient(proxy.url, run=run) as client:
        proxy.faults.extend(["hang"] * 100)
        with pytest.raises(PeerError, match=r"1 attempts.*ReadTimeout"):
            client.status(timeout=0.2)


def test_other_server_at_url_raises_error(service):
    with flaky_proxy(service.url) as proxy, TrajectoryClient(proxy.url, timeout=DEADLINE) as client:
        proxy.faults.extend(["other"])
        with pytest.raises(PeerError, match=r"status 200: <p>Hello</p> Is the URL right\?"):
            client.status()
    with TrajectoryClient(service.url + "/docs") as client, pytest.raises(UsageError, match=r"\(404\): Not Found"):
        client.status()


def test_close_ends_waiting_calls(service, run):
    with flaky_proxy(service.url) as proxy, TrajectoryClient(proxy.url, run=run, timeout=DEADLINE) as client:
        proxy.faults.extend(["refuse"] * 1000)
        errors = []

        def ask():
            try:
                client.status()
            except StoppedError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        client.close()
        asking.join(DEADLINE)
        assert len(errors) == 1
        with pytest.raises(StoppedError, match="was stopped or closed"):
            client.status()


def test_service_requires_token_and_accepts_groups_again_after_it_was_full(tmp_path, monkeypatch):
    monkeypatch.setattr(base_client, "_MIN_ATTEMPT", DEADLINE)
    (tmp_path / "token").write_text("secret\n")
    arguments = ("--token-file", str(tmp_path / "token"), "--max-queue-mb", "1", "--store", "memory")
    with running_service(tmp_path, *arguments) as service:
        with (
            TrajectoryClient(service.url) as stranger,
            pytest.raises(UsageError, match=r"\(401\).*Give the client the service's"),
        ):
            stranger.status()
        with TrajectoryClient(service.url, token="secret", timeout=DEADLINE) as client:
            client.register(batch_size=1, max_token_len=100_000, num_steps=10)
            large = Group([[1] * 50_000], [[1] * 50_000], [1.0])  # 400 kB
            client.post([large, large])
            with pytest.raises(UnavailableError, match=r"not accepted after .* 503"):
                client.post(large, timeout=0.1)
            posting = threading.Thread(target=client.post, args=(large,))
            posting.start()
            sizes = [len(client.batch(wait=DEADLINE).groups[0].tokens[0]) for _ in range(3)]
            posting.join(DEADLINE)
            assert sizes == [50_000] * 3


# Tests of retries.


@pytest.mark.parametrize("fault", ["refuse", "drop", "busy"])
def test_group_is_added_once_despite_faults(service, client, run, fault):
    client.register(**SETTINGS)
    with (
        flaky_proxy(service.url, retry_after="0") as proxy,
        TrajectoryClient(proxy.url, run=run, timeout=DEADLINE) as through,
    ):
        proxy.faults.extend([fault, fault])
        assert through.post(numbered(1)).replayed == (fault == "drop")
        proxy.faults.extend([fault])
        through.post([numbered(2), numbered(3)])
        assert len(proxy.requests) == 5
    assert served(client) == [1, 2, 3]


@pytest.mark.parametrize("lease", [None, 60.0])
@pytest.mark.parametrize("fault", ["refuse", "drop", "busy"])
def test_batch_is_delivered_once_despite_faults(service, client, run, fault, lease):
    client.register(**SETTINGS)
    client.post([numbered(1), numbered(2)])
    with (
        flaky_proxy(service.url, retry_after="0") as proxy,
        TrajectoryClient(proxy.url, run=run, timeout=DEADLINE) as through,
    ):
        proxy.faults.extend([fault, fault])
        first = through.batch(lease=lease)
        proxy.faults.extend([fault])
        second = through.batch(lease=lease)
    assert numbers_of(first.groups + second.groups) == [1, 2]
    assert client.status().current_step == 2


def test_environment_is_registered_once_despite_faults(service, client, run):
    client.register(**SETTINGS)
    client.batch()
    with flaky_proxy(service.url) as proxy, TrajectoryClient(proxy.url, run=run, timeout=DEADLINE) as through:
        proxy.faults.extend(["drop", "drop"])
        assert through.register_env(**ENV).env_id == 0
    assert client.register_env(**ENV).env_id == 1


def test_client_waits_as_retry_after_header_requests(service, run, monkeypatch):
    monkeypatch.setattr(base_client, "_MIN_ATTEMPT", DEADLINE)
    with (
        flaky_proxy(service.url, retry_after="0.7") as proxy,
        TrajectoryClient(proxy.url, run=run, timeout=DEADLINE) as client,
    ):
        proxy.faults.extend(["busy"])
        began = time.monotonic()
        client.status()
        assert time.monotonic() - began >= 0.7
        proxy.faults.extend(["busy"])
        with pytest.raises(UnavailableError, match="1 attempts"):  # The service requests a pause of 0.7 s.
            client.status(timeout=0.5)


@pytest.mark.parametrize(
    "value",
    [np.float32(0.5), "\ud800", {(1, 2): 0}, {1: 0}, [{"deep": ({None: 0},)}, "after"], float("nan")],
    ids=["numpy", "surrogate", "tuple as key", "number as key", "None as key", "nan"],
)
@pytest.mark.parametrize("binary", [True, False])
def test_group_with_non_json_values_is_refused_before_sending(value, binary):
    group = a_group(generation_params={"temperature": value})
    with (
        TrajectoryClient("http://127.0.0.1:1") as client,
        pytest.raises(UsageError, match="group cannot be sent: .*JSON"),
    ):
        client.post([a_group(), group], binary=binary)


def test_recursive_group_is_refused_before_sending():
    circle: dict = {}
    circle["again"] = [circle]
    with (
        TrajectoryClient("http://127.0.0.1:1") as client,
        pytest.raises(UsageError, match="cannot be sent: .*recursion"),
    ):
        client.post(a_group(group_overrides=circle))


@pytest.mark.system
def test_each_group_is_added_once_although_service_is_killed(tmp_path):
    with running_service(tmp_path) as service, TrajectoryClient(service.url, timeout=DEADLINE) as client:
        client.register(**SETTINGS)
        quarter = threading.Barrier(4)

        def post(first: int) -> None:
            with TrajectoryClient(service.url, timeout=DEADLINE) as own:
                for number in range(first, first + 20):
                    if number % 20 == 5:
                        quarter.wait(DEADLINE)
                    own.post(numbered(number))

        posting = [threading.Thread(target=post, args=(20 * index,)) for index in range(3)]
        for thread in posting:
            thread.start()
        quarter.wait(DEADLINE)
        service.restart()
        for thread in posting:
            thread.join(DEADLINE)
        assert sorted(served(client)) == list(range(60))


# Tests of the asyncio client.


def test_async_client_retries(service, client, run):
    async def converse(url: str) -> list[int]:
        async with AsyncTrajectoryClient(url, run=run, timeout=DEADLINE) as remote:
            await remote.register(**SETTINGS)
            assert await remote.batch() is None
            env = await remote.register_env(**ENV)
            await asyncio.gather(*(remote.post(numbered(number, env_id=env.env_id)) for number in range(6)))
            assert (await remote.wait_until_wanted(env.env_id, 6)).queue_size == 6
            with pytest.raises(UsageError, match="3 sequences"):
                await remote.post(numbered(9, size=3))
            batch = await remote.batch(lease=60)
            assert await remote.ack(batch.batch_id)
            return numbers_of(batch.groups)

    with flaky_proxy(service.url, retry_after="0") as proxy:
        proxy.faults.extend(["refuse", "pass", "drop", "busy", "drop", "drop", "refuse", "pass", "drop"])
        first = asyncio.run(converse(proxy.url))
    assert sorted(first + served(client)) == list(range(6))


def test_async_client_stops_retrying_at_deadline(service, run):
    async def ask(url: str) -> None:
        async with AsyncTrajectoryClient(url, run=run) as remote:
            await remote.status(timeout=0.3)

    with flaky_proxy(service.url) as proxy:
        proxy.faults.extend(["hang"] * 10)
        with pytest.raises(PeerError, match="GET .*/status: no answer after"):
            asyncio.run(ask(proxy.url))
