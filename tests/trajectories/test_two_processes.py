"""Test two service processes that share a Redis server, with four environments and two trainers. Kill one process."""

from __future__ import annotations

import threading
import time

import pytest

from rlframe.trajectories import Group, TrajectoryClient
from tests.trajectories.redis_server import running_redis
from tests.trajectories.serving import DEADLINE, running_service

GROUPS = 60  # number of groups from each environment


@pytest.mark.system
def test_no_group_is_lost_or_duplicated_when_one_of_two_processes_is_killed(tmp_path):
    folders = [tmp_path / "one", tmp_path / "other", tmp_path / "redis"]
    for folder in folders:
        folder.mkdir()
    with running_redis(folders[2], appendonly="yes", appendfsync="always") as server:
        store = ("--store", server.url)
        with running_service(folders[0], *store) as one, running_service(folders[1], *store) as other:
            work = Work([one.url, other.url])
            work.register()
            threads = [
                threading.Thread(target=work.run, args=(job, i)) for job in (work.send, work.train) for i in (0, 1)
            ]
            threads += [threading.Thread(target=work.run, args=(work.send, i)) for i in (2, 3)]
            for thread in threads:
                thread.start()
            try:
                assert work.half.wait(DEADLINE)
                one.restart()
            finally:
                for thread in threads:
                    thread.join(2 * DEADLINE)
            assert work.errors == []
            numbers = [number for batch in work.batches.values() for number in batch]
            assert sorted(numbers) == [1000 * i + number for i in range(4) for number in range(GROUPS)]
            assert sorted(work.steps.values()) == list(range(len(work.batches)))
            assert set(work.by) == {0, 1}  # Each trainer has received batches.
            for service in (one, other):
                with TrajectoryClient(service.url) as client:
                    end = time.monotonic() + DEADLINE
                    while client.status().leased and time.monotonic() < end:  # wait for the last `ack`
                        time.sleep(0.02)
                    status = client.status()
                    assert (status.queue_size, status.leased, status.current_step) == (0, 0, len(work.batches))
                assert service.stop() == 0


class Work:
    """Four environments and two trainers. Those with even numbers use the first service process, odd the second."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._lock = threading.Lock()
        self.errors: list[BaseException] = []
        self.half = threading.Event()
        self.batches: dict[int, list[int]] = {}
        self.steps: dict[int, int] = {}
        self.by: list[int] = []

    def client(self, i: int) -> TrajectoryClient:
        return TrajectoryClient(self._urls[i % 2], timeout=DEADLINE, consumer=f"{i}")

    def register(self) -> None:
        for i in (0, 1):  # The two trainers are ranks of one trainer, so both register.
            with self.client(i) as client:
                client.register(batch_size=4, max_token_len=16, num_steps=1000)

    def run(self, job, i: int) -> None:
        try:
            with self.client(i) as client:
                job(client, i)
        except BaseException as error:
            self.errors.append(error)
            self.half.set()

    def send(self, client: TrajectoryClient, i: int) -> None:
        for number in range(GROUPS):
            client.post(Group([[i, number]] * 2, [[1, 1]] * 2, [1000.0 * i + number] * 2))

    def train(self, client: TrajectoryClient, i: int) -> None:
        while True:
            with self._lock:
                if sum(map(len, self.batches.values())) == 4 * GROUPS or self.errors:
                    return
            served = client.batch(wait=0.2, lease=2 * DEADLINE)
            if served is None:
                continue
            numbers = [int(group.scores[0]) for group in served.groups]
            with self._lock:
                assert self.batches.setdefault(served.batch_id, numbers) == numbers
                self.steps[served.batch_id] = served.step
                self.by.append(i)
                if len(self.batches) == GROUPS:
                    self.half.set()
            client.ack(served.batch_id)
