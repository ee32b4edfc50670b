"""Tests of the local operator with real processes, which are started, killed, stopped and ended."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from rlframe import handles
from rlframe.coordinator.messages import WorkerInfo
from rlframe.coordinator.operators.supervised import LocalOperator, OperatorHandle
from rlframe.engines.supervision.supervisor import Backoff
from rlframe.errors import UsageError
from rlframe.transport.sockets import SocketTransport
from tests.coordinator.operators import workers
from tests.coordinator.operators.operator_driver import OperatorDriver
from tests.waiting import is_process_alive, wait_until

HERE = pathlib.Path(__file__).parent
FAST_BACKOFF = Backoff(first=0.01)
MAKERS = {"learner": workers.make_idle_worker, "collector": workers.make_idle_worker}


class LocalFixture:
    """A local operator and its output. A driver calls the operator through a handle, as a coordinator does."""

    def __init__(self, makers=MAKERS, backoff=FAST_BACKOFF, **options) -> None:
        self.output = io.StringIO()
        self.owned = LocalOperator(makers, output=self.output, backoff=backoff, **options)
        self.handle = pickle.dumps(self.owned)
        self.operator = OperatorDriver(pickle.loads(self.handle))

    def up(self, role: str, n: int, but: tuple[WorkerInfo, ...] = ()) -> list[WorkerInfo]:
        """Wait until `n` workers of the role serve, in addition to the workers in `but`. Return the new workers."""

        def serving() -> list[WorkerInfo]:
            infos = [info for info in self.operator.list_workers() if info.role == role and info.key not in gone]
            return infos if len(infos) == n and all(info.address for info in infos) else []

        gone = {info.key for info in but}
        return wait_until(serving)


@pytest.fixture
def local():
    made = []

    def make(*args, **options) -> LocalFixture:
        made.append(LocalFixture(*args, **options))
        made[-1].operator.connect()
        return made[-1]

    yield make
    for each in made:
        each.operator.disconnect()
        each.owned.close()


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(map(is_process_alive, processes))


def pid(info: WorkerInfo) -> int:
    return handles.Remote([info.address], info.worker_id, transport=SocketTransport()).pid()


def ping(info: WorkerInfo):
    return handles.Remote([info.address], info.worker_id, transport=SocketTransport()).ping()


def environ(info: WorkerInfo) -> dict[str, str]:
    return handles.Remote([info.address], info.worker_id, transport=SocketTransport()).resources()


def test_workers_run_until_the_operator_ends(local):
    one = local()
    one.operator.scale("collector", 2)
    first, second = one.up("collector", 2)
    assert [first.key, second.key] == [("collector/0", 0), ("collector/1", 0)]
    answer = ping(second)
    assert (answer.worker_id, answer.incarnation, pid(second)) == ("collector/1", 0, second.pid)
    assert "rlframe: collector 1" in psutil.Process(second.pid).cmdline()[0]
    processes = family(first.pid) + family(second.pid)
    assert len(processes) == 4  # each worker has a child
    one.operator.disconnect()
    wait_until(lambda: are_gone(processes))
    assert one.owned.list_workers() == []
    lines = one.output.getvalue().splitlines()
    assert "[collector/1] collector/1 is up as incarnation 0" in lines and "[collector/1] closed" in lines
    one.operator.disconnect()  # a repeated call changes nothing


def test_killed_worker_and_reported_worker_are_replaced_once(local):
    one = local()
    one.operator.scale("collector", 2)
    first, second = one.up("collector", 2)
    processes = family(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    replaced, other = one.up("collector", 2, but=(first,))
    assert replaced.key == ("collector/0", 1) and other == second
    wait_until(lambda: are_gone(processes))  # the worker and its child
    assert "was killed by SIGKILL" in one.output.getvalue()

    processes = family(second.pid)
    os.kill(second.pid, signal.SIGSTOP)
    for _ in range(3):
        one.operator.replace_workers([second.key])
    assert second.key not in [info.key for info in one.operator.list_workers()]
    both = one.up("collector", 2, but=(first, second))
    assert [info.key for info in both] == [("collector/0", 1), ("collector/1", 1)]
    one.operator.replace_workers([second.key])  # a late request to replace a worker that was already replaced
    assert [ping(info).incarnation for info in both] == [1, 1]
    assert one.operator.list_workers() == both
    wait_until(lambda: are_gone(processes))


def test_released_worker_is_not_replaced_and_its_incarnation_number_continues_later(local):
    one = local()
    one.operator.scale("collector", 2)
    first, second = one.up("collector", 2)
    one.operator.scale("collector", 1)
    one.operator.scale("collector", 1)
    assert one.operator.list_workers() == [first, second]  # requesting fewer workers ends no worker
    processes = family(second.pid)
    one.operator.release([second.key])
    assert one.operator.list_workers() == [first]
    wait_until(lambda: are_gone(processes))
    wait_until(lambda: "[collector/1] closed" in one.output.getvalue())  # the worker had time to close
    one.operator.scale("collector", 2)
    assert [info.key for info in one.up("collector", 2)] == [first.key, ("collector/1", 1)]


@pytest.mark.system
def test_workers_survive_a_killed_coordinator_and_are_found_by_the_next_coordinator(local, tmp_path):
    one = local()
    (tmp_path / "handle").write_bytes(one.handle)
    coordinator = subprocess.Popen(
        [sys.executable, HERE / "killed_coordinator.py", tmp_path / "handle"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert coordinator.stdout.readline() == "up\n"
    coordinator.kill()
    coordinator.wait()
    coordinator.stdout.close()

    found = one.operator.list_workers()
    assert [info.key for info in found] == [("collector/0", 0), ("collector/1", 0)]
    assert [pid(info) for info in found] == [info.pid for info in found]
    one.operator.scale("collector", 2)
    os.kill(found[0].pid, signal.SIGKILL)
    replaced, other = one.up("collector", 2, but=found[:1])
    assert replaced.key == ("collector/0", 1) and other == found[1]
    assert isinstance(pickle.loads(one.handle), OperatorHandle)


def test_workers_end_when_the_operator_process_ends():
    owner = subprocess.Popen(
        [sys.executable, HERE / "killed_launcher.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    *pids, sockets = owner.stdout.readline().split()
    processes = [psutil.Process(int(pid)) for pid in pids]
    assert len(processes) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: are_gone(processes))
    wait_until(lambda: not os.path.exists(sockets))


@pytest.mark.system
def test_worker_without_heartbeat_is_replaced(local):
    one = local(hang_timeout=1.5)
    one.operator.scale("collector", 1)
    (first,) = one.up("collector", 1)
    wait_until(lambda: "is up as incarnation 0" in one.output.getvalue())
    os.kill(first.pid, signal.SIGSTOP)
    (second,) = one.up("collector", 1, but=(first,))
    assert second.key == ("collector/0", 1)
    assert re.search(r"\(incarnation 0\) hung: no heartbeat for \d+ s, and was killed\.", one.output.getvalue())


def test_worker_that_raises_at_start_prints_its_traceback_and_is_retried_with_backoff(local, tmp_path):
    lives = tmp_path / "lives"
    one = local({"collector": workers.CrashingMaker(str(lives))}, backoff=Backoff(first=0.1, longest=600.0))
    one.operator.scale("collector", 1)
    problem = wait_until(lambda: re.search(r".*[3-9] times in a row", one.operator.problems().get("collector/0", "")))[
        0
    ]
    assert lives.read_text().split()[:3] == ["0", "1", "2"]
    assert "failed with exit code 1" in problem and "RuntimeError: cannot live" in problem
    assert "[collector/0] RuntimeError: cannot live" in one.output.getvalue().splitlines()
    assert "[collector/0] Traceback (most recent call last):" in one.output.getvalue().splitlines()


@pytest.mark.system
def test_worker_that_does_not_close_is_killed(local):
    one = local({"collector": workers.make_unclosable_worker})
    one.operator.scale("collector", 1)
    (info,) = one.up("collector", 1)
    processes = family(info.pid)
    began = time.monotonic()
    one.operator.disconnect()
    wait_until(lambda: are_gone(processes))
    assert one.owned.list_workers() == []
    assert time.monotonic() - began < 10.0


def test_by_default_only_the_learner_has_accelerators_and_several_threads(local, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("HIDDEN", "1")
    monkeypatch.delenv("NPROC", raising=False)
    one = local()
    one.operator.scale("learner", 1)
    one.operator.scale("collector", 1)
    learner, collector = environ(one.up("learner", 1)[0]), environ(one.up("collector", 1)[0])
    assert (learner["JAX_PLATFORMS"], learner["HIDDEN"], "NPROC" in learner) == ("cuda", "1", False)
    assert (collector["JAX_PLATFORMS"], collector["CUDA_VISIBLE_DEVICES"], collector["NPROC"]) == ("cpu", "", "1")
    one = local(env={"collector": {"HIDDEN": None, "NPROC": "3"}})
    one.operator.scale("collector", 1)
    collector = environ(one.up("collector", 1)[0])
    assert (collector["NPROC"], collector["JAX_PLATFORMS"], "HIDDEN" in collector) == ("3", "cuda", False)


def test_unpicklable_maker_and_unknown_role_are_refused(local):
    with pytest.raises(UsageError, match="cannot be sent to their processes"):
        LocalOperator({"learner": threading.Lock()})
    one = local({"learner": workers.make_idle_worker})
    with pytest.raises(UsageError, match="no workers of the role 'collector', only learner"):
        one.owned.scale("collector", 1)
