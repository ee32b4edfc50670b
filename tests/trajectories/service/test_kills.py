"""Check that each acknowledged group is served exactly once, although SIGKILL ends the service several times."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.trajectories.queues import SETTINGS
from tests.trajectories.serving import ServiceProcess, running_service

CLIENTS = 4
GROUP_SIZE = 4  # sequences in a group; two groups fill a batch
DEADLINE = 120.0  # maximum seconds for any operation on a busy machine
LEASE = 1.0
ONCE, LEASED = "default", "leased"  # names of two runs; batches of ONCE have no lease, and batches of LEASED have one


def group_of(client: int, number: int) -> dict[str, Any]:
    """Return a group whose tokens and scores contain the client's number and the group's number."""
    length = 3 + random.Random(1000 * client + number).randrange(60)
    tokens = [[client, number, *range(sequence, sequence + length)] for sequence in range(GROUP_SIZE)]
    masks = [[-100, *sequence[1:]] for sequence in tokens]
    return {"tokens": tokens, "masks": masks, "scores": [client + number / 8] * GROUP_SIZE, "env_id": client}


def key_of(item: dict[str, Any]) -> tuple[int, int]:
    """Check that a served group is unchanged. Return (the client's number, the group's number)."""
    client, number = item["tokens"][0][:2]
    assert {name: value for name, value in item.items() if value is not None} == group_of(client, number)
    return client, number


class Connection:
    """A client connection. If the service is being restarted, a request first waits until the service runs again."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._http: http.client.HTTPConnection | None = None

    def once(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a request once. Return the status and the answer, or raise `OSError` or `HTTPException`."""
        assert self._load.up.wait(DEADLINE)
        if self._http is None:
            host, _, port = self._load.service.url.removeprefix("http://").partition(":")
            self._http = http.client.HTTPConnection(host, int(port), timeout=DEADLINE)
        try:
            sent = None if body is None else json.dumps(body).encode()
            self._http.request(method, path, sent, {"Content-Type": "application/json", **headers})
            with self._http.getresponse() as answer:
                return answer.status, json.loads(answer.read())
        except BaseException:
            self.close()
            raise

    def until_answered(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Repeat the request until the status is 200."""
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, answer = self.once(method, path, body, **headers)
                if status == 200:
                    return answer
                assert status == 503, (status, answer)
            self._load.check()

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None


class Load:
    """Four client threads that post groups to both runs, and a consumer thread for each run. Stores their answers."""

    def __init__(self, service: ServiceProcess) -> None:
        self.service = service
        self.up = threading.Event()
        self.up.set()
        self.sent: dict[str, set[tuple[int, int]]] = {ONCE: set(), LEASED: set()}
        self.acknowledged: dict[str, set[tuple[int, int]]] = {ONCE: set(), LEASED: set()}
        self.envs: dict[tuple[str, int], dict[str, Any]] = {}
        self.batches: list[dict[str, Any]] = []  # received batches of the run ONCE
        self.deliveries: list[dict[str, Any]] = []  # received batches of the run LEASED, with redeliveries
        self.acked: list[int] = []  # ids of the batches that the consumer acknowledged
        self._progress = threading.Condition()
        self._posting = True
        self._consuming = True
        self._errors: list[BaseException] = []
        jobs = [lambda client=client: self._post(client) for client in range(CLIENTS)]
        self._posters = [threading.Thread(target=self._run, args=(job,)) for job in jobs]
        self._consumers = [threading.Thread(target=self._run, args=(job,)) for job in (self._take, self._lease)]

    def register(self) -> None:
        connection = Connection(self)
        for run in (ONCE, LEASED):
            connection.until_answered("POST", f"/runs/{run}/register", SETTINGS)
            assert connection.until_answered("GET", f"/runs/{run}/batch") == {"batch": None}
            for client in range(CLIENTS):
                fields = {"max_token_length": 100, "desired_name": "env", "weight": 1.0, "group_size": GROUP_SIZE}
                answer = connection.until_answered("POST", f"/runs/{run}/register-env", fields)
                assert (answer["env_id"], answer["wandb_name"]) == (client, f"env_{client}")
                self.envs[run, client] = {**fields, "resume_token": answer["resume_token"]}
        connection.close()

    def check_envs(self) -> None:
        """Check that each environment keeps its id and name, and that the step equals the number of served batches."""
        connection = Connection(self)
        for (run, client), fields in self.envs.items():
            answer = connection.until_answered("POST", f"/runs/{run}/register-env", fields)
            assert (answer["env_id"], answer["wandb_name"]) == (client, f"env_{client}")
        seen = len(self.batches)
        step = connection.until_answered("GET", "/status")["current_step"]
        assert seen <= step <= len(self.batches) + 1  # Perhaps the consumer has not yet received the last batch.
        connection.close()

    def wait_for(self, more: int) -> None:
        """Wait until the service has acknowledged `more` additional groups."""
        with self._progress:
            goal = self._count() + more
            assert self._progress.wait_for(lambda: self._count() >= goal or self._errors, DEADLINE)
        self.check()

    def restart(self) -> None:
        """Kill the service with SIGKILL during requests, and start it again."""
        self.up.clear()
        self.service.kill()
        self.service.start()
        self.up.set()

    def start(self) -> None:
        for thread in self._posters + self._consumers:
            thread.start()

    def finish(self) -> None:
        """Stop the clients. Stop the consumers after they have received all groups."""
        self._posting = False
        self._join(self._posters)
        connection = Connection(self)
        for run in (ONCE, LEASED):  # An odd number of groups needs one more group to fill the last batch.
            status = connection.until_answered("GET", f"/runs/{run}/status")
            if status["queue_size"] % 2:
                self._send(connection, run, 0, 1_000_000, keyed=True)
        connection.close()
        self._consuming = False
        self._join(self._consumers)

    def stop(self) -> None:
        """Stop all threads. Tests also call this method after an error."""
        self._posting = self._consuming = False
        self.up.set()
        for thread in self._posters + self._consumers:
            if thread.is_alive():
                thread.join(DEADLINE)

    def check(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        self.check()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            with self._progress:
                self._errors.append(error)
                self._progress.notify_all()

    def _count(self) -> int:
        return sum(map(len, self.acknowledged.values()))

    # The following methods run in client and consumer threads.

    def _post(self, client: int) -> None:
        """Post groups to both runs. Clients 0 and 2 use idempotency keys, and repeat requests that got no answer."""
        connection = Connection(self)
        for number in itertools.count():
            if not self._posting:
                break
            self._send(connection, (ONCE, LEASED)[number % 2], client, number, keyed=client % 2 == 0)
        connection.close()

    def _send(self, connection: Connection, run: str, client: int, number: int, keyed: bool) -> None:
        path, group = f"/runs/{run}/scored_data", group_of(client, number)
        self.sent[run].add((client, number))
        if keyed:
            answer = connection.until_answered("POST", path, group, **{"Idempotency-Key": f"{client}/{number}"})
        else:
            try:
                status, answer = connection.once("POST", path, group)
            except (OSError, http.client.HTTPException):
                return  # It is unknown whether the group was stored.
            assert status == 200, answer
        assert answer == {"status": "received"}
        with self._progress:
            self.acknowledged[run].add((client, number))
            self._progress.notify_all()

    def _take(self) -> None:
        """Receive the batches of the run ONCE. All attempts to get a batch have the same `request` parameter."""
        connection = Connection(self)
        for number in itertools.count():
            consuming = self._consuming
            answer = {"batch": None}
            while answer["batch"] is None:
                path = f"/runs/{ONCE}/batch?consumer=trainer&request={number}&wait=0.2"
                answer = connection.until_answered("GET", path)
                if answer["batch"] is None and not consuming:
                    connection.close()
                    return
                consuming = self._consuming
            self.batches.append(answer)

    def _lease(self) -> None:
        """Lease the batches of the run LEASED. Some are not acknowledged, so the service redelivers them."""
        connection, forgetful = Connection(self), random.Random(0)
        while True:
            consuming = self._consuming
            path = f"/runs/{LEASED}/batch?lease={LEASE}&consumer=trainer&wait=0.2"
            answer = connection.until_answered("GET", path)
            if answer["batch"] is not None:
                self.deliveries.append(answer)
                if not consuming or forgetful.random() < 0.8:
                    self._acknowledge(connection, answer["batch_id"])
            elif not consuming:
                status = connection.until_answered("GET", f"/runs/{LEASED}/status")
                if status["leased"] == 0:
                    connection.close()
                    return

    def _acknowledge(self, connection: Connection, batch_id: int) -> None:
        repeated = False
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, answer = connection.once("POST", f"/runs/{LEASED}/batch/{batch_id}/ack")
                # A repeated acknowledgment gets 404 if the first acknowledgment succeeded but its answer was lost.
                assert status == 200 or (repeated and status == 404), (status, answer)
                self.acked.append(batch_id)
                return
            repeated = True
            self.check()


@contextlib.contextmanager
def under_load(service: ServiceProcess) -> Iterator[Load]:
    load = Load(service)
    load.register()
    load.start()
    try:
        yield load
    finally:
        load.stop()


def check_served(load: Load, run: str, served: list[tuple[int, int]]) -> None:
    assert len(served) == len(set(served)), "a group was served twice"
    assert load.acknowledged[run] <= set(served), "an acknowledged group was lost"
    assert set(served) <= load.sent[run], "a group was served that no client sent"


def kill_under_load(tmp_path, rounds: int, groups: int) -> None:
    chance = random.Random()
    with running_service(tmp_path) as service, under_load(service) as load:
        for _ in range(rounds):
            load.wait_for(chance.randrange(1, groups))
            load.restart()
            load.check_envs()
        load.wait_for(1)
        load.finish()
        assert service.stop() == 0

    served = [key_of(item) for batch in load.batches for item in batch["batch"]]
    check_served(load, ONCE, served)
    assert [batch["step"] for batch in load.batches] == list(range(len(load.batches)))
    assert all(sum(len(item["tokens"]) for item in batch["batch"]) == 8 for batch in load.batches)

    first: dict[int, dict[str, Any]] = {}
    for delivery in load.deliveries:
        known = first.setdefault(delivery["batch_id"], delivery)
        assert (known["batch"], known["step"]) == (delivery["batch"], delivery["step"])
        # If the answer with a batch's first delivery was lost, the first recorded delivery is a redelivery.
        assert delivery["redelivered"] or known is delivery
    check_served(load, LEASED, [key_of(item) for batch in first.values() for item in batch["batch"]])
    assert sorted(delivery["step"] for delivery in first.values()) == list(range(len(first)))
    assert len(load.acked) == len(set(load.acked)), "an acknowledged batch was delivered again"
    assert set(load.acked) == set(first)


@pytest.mark.system
def test_acknowledged_groups_are_served_once_over_three_kills(tmp_path):
    kill_under_load(tmp_path, rounds=3, groups=60)


@pytest.mark.system
@pytest.mark.timeout(1200)
def test_acknowledged_groups_are_served_once_over_twenty_kills(tmp_path):
    """The test sends more than 20,000 commands, because the service takes snapshots only after many commands."""
    kill_under_load(tmp_path, rounds=20, groups=1500)
