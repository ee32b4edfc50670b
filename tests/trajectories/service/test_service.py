"""Tests of the service with its log of commands: restarts, several processes with one store, and failing stores."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future

import httpx
import msgspec
import pytest

from rlframe.errors import PeerError, StoreError, UnavailableError
from rlframe.trajectories.config import Settings
from rlframe.trajectories.service.app import make_app
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.state_machine import encode_state
from rlframe.trajectories.stores import RecordsDroppedError, open_store
from rlframe.trajectories.stores.base import MemoryStore
from tests.trajectories.queues import SETTINGS
from tests.trajectories.redis_server import redis_server  # noqa: F401

DEADLINE = 60.0


@contextlib.asynccontextmanager
async def serving(store, **options):
    service = Service(store, **{"max_bytes": 1 << 30, **options})
    service.restore()
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def run(test):
    """Run a coroutine with a deadline."""
    asyncio.run(asyncio.wait_for(test, DEADLINE))


async def begin(service, name="run", **settings):
    registered = await service.submit(name, "register", settings={**SETTINGS, **settings}, uuid="1")
    await service.submit(name, "note_trainer")
    return registered


async def join(service, name="run", **fields):
    fields = {
        "desired_name": "env",
        "max_token_length": 9,
        "weight": 1.0,
        "group_size": 4,
        "min_batch_allocation": None,
        **fields,
    }
    return await service.submit(name, "register_env", **fields, resume_token=None, token=fields["desired_name"])


async def add(service, payload, name="run", sequences=4, key=None, policy_version=None, env_id=None):
    return await service.submit(
        name,
        "add",
        payload,
        sequences=sequences,
        tokens=1,
        size_bytes=len(payload),
        env_id=env_id,
        policy_version=policy_version,
        key=key,
    )


async def abandoned(store):
    """Start a service that is never closed, as if SIGKILL had ended it."""
    service = Service(store, max_bytes=1 << 30, snapshot_bytes=200_000)
    service.restore()
    await service.start()
    return service


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_restart_restores_same_state(kind, tmp_path):
    url = "memory" if kind == "memory" else f"sqlite:{tmp_path}/queue.db"

    async def test():
        store = open_store(url)
        service = await abandoned(store)
        await begin(service)
        await join(service)
        for i in range(9):
            await add(service, b"payload %d" % i, key=f"k{i}")
        await add(service, b"again", key="k3")
        batch, payloads = await service.take("run", lease_seconds=1000.0, consumer="a", request="1")
        assert payloads == [b"payload 0", b"payload 1"]
        assert await service.take("run")
        await add(service, b"elsewhere", name="other")
        before = {name: service.queue(name).get_state() for name in service.runs}
        await asyncio.sleep(0)
        service.stop_waiting()
        async with serving(store) as again:
            after = {name: again.queue(name).get_state() for name in again.runs}
            assert msgspec.msgpack.encode(after) == msgspec.msgpack.encode(before)
            assert again.stored_bytes == service.stored_bytes
            repeated, same = await again.take("run", lease_seconds=1000.0, consumer="a", request="1")
            assert (repeated.batch_id, same) == (batch.batch_id, payloads)
            _, payloads = await again.take("run")
            assert payloads == [b"payload 4", b"payload 5"]

    run(test())


def test_orphaned_payloads_are_deleted_at_next_start(tmp_path):
    async def test():
        store = open_store(f"sqlite:{tmp_path}/queue.db")
        first = await abandoned(store)
        await begin(first)
        for i in range(4):
            await add(first, b"payload %d" % i)
        # as if SIGKILL had ended the service before it deleted payloads
        first._delete_payloads = lambda positions: None
        await first.take("run")
        await add(first, b"payload 0", key="k")
        await add(first, b"payload 0", key="k")
        assert len(store.payload_positions()) == 6
        first.stop_waiting()
        async with serving(store) as service:
            await asyncio.sleep(0)
            await add(service, b"last")  # The store has deleted the payloads before it confirms this append.
            assert len(store.payload_positions()) == 4
            assert (await service.take("run"))[1] == [b"payload 2", b"payload 3"]

    run(test())


def test_payloads_of_refused_and_repeated_groups_are_deleted():
    async def test():
        store = MemoryStore()
        async with serving(store) as service:
            await begin(service)
            assert (await add(service, b"large", sequences=9)).too_large
            assert (await add(service, b"first", key="k")).status == "received"
            assert (await add(service, b"again", key="k")).duplicate
            assert len(store.payload_positions()) == 1
            assert (service.stored_bytes, service.pending_bytes) == (5, 0)

    run(test())


def test_snapshots_shorten_log_and_restore_same_state():
    async def test():
        store = MemoryStore()
        async with serving(store, snapshot_bytes=5_000) as service:
            await begin(service)
            for i in range(120):
                await add(service, b"%d" % i, key=f"k{i}")
            while store.load() is None or store.load()[0] < 50:  # wait for a snapshot of at least 50 commands
                await asyncio.sleep(0.01)
            before = msgspec.msgpack.encode(service.queue("run").get_state())
            again = Service(store, max_bytes=1)
            again.restore()
            assert msgspec.msgpack.encode(again.queue("run").get_state()) == before

    run(test())


@pytest.mark.parametrize(
    "command, arguments, answer",
    [
        ("disconnect_env", {"env_id": 0}, False),
        ("heartbeat", {"env_id": 0}, False),
        ("ack", {"batch_id": 3}, False),
        ("nack", {"batch_id": 3}, False),
        ("renew", {"batch_id": 3, "lease_seconds": 1.0}, False),
        ("take", {}, None),
        ("reset", {}, None),
        ("resume", {}, None),
    ],
)
def test_mistyped_run_is_not_created(command, arguments, answer):
    async def test():
        store = MemoryStore()
        async with serving(store) as service:
            assert await service.submit("typo", command, **arguments) == answer
            assert service.runs == []
            await service.submit("other", "pause")
            again = Service(store, max_bytes=1)
            again.restore()
            assert again.runs == ["other"]
            await service.submit("typo", "pause")
            assert service.runs == ["other", "typo"]
            assert await service.submit("typo", command, **arguments) == answer

    run(test())


@pytest.mark.system
@pytest.mark.parametrize("ends", ["resume", "reset"])
def test_command_takes_effect_on_run_that_another_process_has_just_created(ends, redis_server):  # noqa: F811
    async def test():
        stores = [open_store(redis_server.url.replace("/0", "/4")) for _ in range(2)]
        read, caught_up = stores[1].read, threading.Event()
        async with serving(stores[0]) as one, serving(stores[1]) as other:
            stores[1].read = lambda after: (caught_up.wait(DEADLINE), read(after))[1]
            await one.submit(ends, "pause")
            await add(one, b"group", name=ends)
            answer = asyncio.ensure_future(other.submit(ends, ends))
            await asyncio.sleep(0)
            caught_up.set()
            assert await answer is None
            # The log has this command after the command of the other process.
            await one.submit(ends, "heartbeat", env_id=0)
            status = one.queue(ends).status()
            assert (status.paused, status.queue_size) == (False, 1 if ends == "resume" else 0)

    run(test())


def test_waiting_request_gets_batch_that_becomes_ready_just_before_the_wait(monkeypatch):
    """The batch becomes ready after the request's first attempt, but before the request waits for a change."""

    async def test():
        async with serving(MemoryStore()) as service:
            await begin(service)
            await join(service, min_batch_allocation=0.5)
            for _ in range(2):
                await add(service, b'{"enough": "but for the share"}')
            take = service.take

            async def take_then_add(*args, **options):
                monkeypatch.undo()
                taken = await take(*args, **options)
                assert taken is None
                await add(service, b'{"its": "share"}', env_id=0)
                return taken

            monkeypatch.setattr(service, "take", take_then_add)
            app = make_app(Settings(store="memory"), service)
            app.state.service = service
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                polled = client.get("/runs/run/batch", params={"wait": 60})
                answer = await asyncio.wait_for(polled, 40.0)
            assert len(answer.json()["batch"]) == 2

    run(test())


class DamagedStore(MemoryStore):
    """A store that has lost the records after its snapshot."""

    def read(self, after, limit=1000):
        raise RecordsDroppedError("The first record is 5.")


@pytest.mark.parametrize("position", [None, 3])
def test_damaged_store_raises_store_error(position):
    async def test():
        damaged = DamagedStore()
        if position is not None:
            damaged.snapshot(position, encode_state({}))
        with pytest.raises(StoreError, match=f"lost records after position {position or 0}"):
            Service(damaged, max_bytes=1).restore()

    run(test())


def test_snapshot_may_contain_extreme_policy_versions():
    """Logs of older versions of rlframe can contain extreme policy versions."""

    async def test():
        store = MemoryStore()
        async with serving(store) as service:
            await begin(service)
            await service.submit("run", "set_policy_version", version=2**63 - 1)
            for _ in range(4):
                await add(service, b"", policy_version=-(2**63))
            while await service.take("run"):
                pass
        assert store.load() and not store.read(store.load()[0])
        again = Service(store, max_bytes=1)
        again.restore()
        assert again.queue("run").report(1).staleness.mean == 2.0**64

    run(test())


def test_failed_snapshot_is_logged_and_store_is_closed(caplog):
    async def test():
        store = MemoryStore()
        async with serving(store) as service:
            await begin(service, starting_step=2**64 - 1)
            for _ in range(2):
                await add(service, b"")
            assert await service.take("run")  # The next step, 2**64, is too large for MessagePack.
        assert "No snapshot was taken" in caplog.text
        with pytest.raises(UnavailableError, match="closed"):
            store.append(b"")

    run(test())


def test_latest_groups_are_available_after_restart_if_store_still_has_them(tmp_path):
    async def test():
        store = open_store(f"sqlite:{tmp_path}/queue.db")
        first = await abandoned(store)
        await begin(first)
        for i in range(25):
            await add(first, b"%d" % i)
        await first.take("run")
        assert await first.latest_groups("run", 2) == [b"24", b"23"]
        assert len(await first.latest_groups("run", 99)) == 20
        first.stop_waiting()
        async with serving(store) as again:
            assert await again.latest_groups("run", 2) == [b"24", b"23"]
            assert await again.latest_groups("elsewhere", 2) == []
        # This service reads the groups from the snapshot that the previous service wrote at its end.
        async with serving(open_store(f"sqlite:{tmp_path}/queue.db")) as third:
            assert await third.latest_groups("run", 2) == [b"24", b"23"]
            while await third.take("run"):
                pass
            assert await third.latest_groups("run", 2) == [b"24"]  # The service keeps the newest payload in memory.

    run(test())


@pytest.mark.parametrize("command", ["reset", "register"])
def test_reset_run_has_no_latest_groups(command):
    async def test():
        async with serving(MemoryStore()) as service:
            await begin(service)
            for name in ("run", "other"):
                await add(service, name.encode(), name=name)
            other = {"settings": {**SETTINGS, "batch_size": 4}, "uuid": "2"}
            await service.submit("run", command, **(other if command == "register" else {}))
            assert await service.latest_groups("run", 20) == []
            assert await service.latest_groups("other", 20) == [b"other"]
            await add(service, b"new")
            assert await service.latest_groups("run", 20) == [b"new"]

    run(test())


def test_groups_over_limit_are_refused():
    async def test():
        async with serving(MemoryStore(), max_bytes=100) as service:
            await begin(service)
            service.check_room(100)
            await add(service, bytes(81))
            assert service.nearly_full
            with pytest.raises(UnavailableError):
                service.check_room(20)
            await add(service, bytes(10))
            await service.take("run")
            assert not service.nearly_full
            service.check_room(100)

    run(test())


def test_leases_expire_without_requests():
    async def test():
        async with serving(MemoryStore()) as service:
            await begin(service)
            await add(service, b"a")
            await add(service, b"b")
            await service.take("run", lease_seconds=0.01)
            while not service.queue("run").may_take(0.0):
                await service.wait_for_change("run", 10.0)
            batch, payloads = await service.take("run")
            assert (batch.delivery, payloads) == (2, [b"a", b"b"])

    run(test())


class FailingStore(MemoryStore):
    """A store in which every append fails with `error`, at once or later through its future."""

    error: Exception | None = None
    at_once = False

    def append(self, record, payload=None):
        if self.error is None:
            return super().append(record, payload)
        if self.at_once:
            raise self.error
        future = Future()
        future.set_exception(self.error)
        return future


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("error", [UnavailableError("full"), PeerError("gone")])
def test_next_command_works_after_failed_append(error, at_once):
    async def test():
        store = FailingStore()
        async with serving(store) as service:
            await begin(service)
            store.error, store.at_once = error, at_once
            with pytest.raises(type(error)):
                await add(service, b"lost")
            store.error = None
            assert service.pending_bytes == 0
            assert (await add(service, b"kept")).status == "received"

    run(test())


@pytest.mark.parametrize("lease_seconds", [None, 60.0])
def test_batch_with_damaged_group_is_dropped_and_logged(lease_seconds, caplog):
    async def test():
        store = MemoryStore()
        async with serving(store) as service:
            await begin(service)
            for i in range(4):
                await add(service, b"%d" % i)
            store.delete_payloads(store.payload_positions()[:1])
            with pytest.raises(UnavailableError, match="1 of its 2 groups can no longer be read"):
                await service.take("run", lease_seconds=lease_seconds)
            assert "Batch 0 of run 'run' is dropped" in caplog.text
            assert (await service.take("run", lease_seconds=lease_seconds))[1] == [b"2", b"3"]
            assert service.queue("run").status().leased == (2 if lease_seconds else 0)  # the groups of the second batch

    run(test())


class SilentStore(MemoryStore):
    """A store that simulates a Redis server: it stores an append, and then never answers."""

    def append(self, record, payload=None):
        super().append(record, payload)
        return Future()


def test_silent_store_raises_peer_error():
    async def test():
        async with serving(SilentStore(), answer_deadline=0.05) as service:
            with pytest.raises(PeerError, match="may still take effect"):
                await asyncio.wait_for(begin(service), DEADLINE)

    run(test())


class UnreadableStore(MemoryStore):
    """A store that simulates a Redis server: it confirms an append, and then cannot be read."""

    shared = True
    gone = False

    def wait(self, after, timeout):
        time.sleep(0.01)
        return True

    def read(self, after, limit=1000):
        if self.gone:
            raise PeerError("It is away.")
        return super().read(after, limit)


def test_service_closes_although_its_store_is_unreadable(caplog):
    async def test():
        store = UnreadableStore()
        async with serving(store) as service:
            await begin(service)
            store.gone = True
            asking = asyncio.ensure_future(service.submit("run", "pause"))
            while "It is away" not in caplog.text:
                await asyncio.sleep(0.01)
            asking.cancel()
        assert service._following.done()

    run(test())


def test_service_fails_when_its_store_fails():
    async def test():
        store = FailingStore()
        async with serving(store) as service:
            failures = []
            service.on_failure = lambda: failures.append(service.failed)
            store.error = StoreError("The disk is gone.")
            for _ in range(2):
                with pytest.raises(StoreError, match="The disk is gone"):
                    await add(service, b"lost")
            assert failures == [store.error]

    run(test())


@pytest.mark.system
def test_no_group_is_lost_or_duplicated_with_two_services_on_one_redis(redis_server):  # noqa: F811
    async def test():
        stores = [open_store(redis_server.url.replace("/0", "/3")) for _ in range(2)]
        async with serving(stores[0], snapshot_bytes=12_000) as one, serving(stores[1]) as other:
            both = [one, other]
            await begin(one)
            while other.queue("run").epoch.registration is None:
                await other.wait_for_change("run", 1.0)
                await asyncio.sleep(0.01)
            groups = [b"%d" % i for i in range(120)]
            served: list[bytes] = []

            async def produce(service, mine):
                for payload in mine:
                    await add(service, payload)

            async def consume(service, consumer):
                while len(served) < len(groups):
                    taken = await service.take("run", lease_seconds=100.0, consumer=consumer)
                    if taken is None:
                        await service.wait_for_change("run", 0.05)
                        continue
                    served.extend(taken[1])
                    assert await service.submit("run", "ack", batch_id=taken[0].batch_id)

            work = [produce(service, groups[i::2]) for i, service in enumerate(both)]
            work += [consume(service, f"consumer {i}") for i, service in enumerate(both)]
            await asyncio.gather(*work)
            assert sorted(served) == sorted(groups)
            while one._machine.position != other._machine.position:
                await asyncio.sleep(0.01)
            states = [msgspec.msgpack.encode(service.queue("run").get_state()) for service in both]
            assert states[0] == states[1]
            for service in both:  # The store has deleted the payloads before it confirms this command.
                await service.submit("run", "pause")
            assert stores[0].payload_positions() == []

    run(test())
