"""Real processes: spawned, killed, stopped, orphaned, adopted, ended."""

from __future__ import annotations

import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import psutil
import pytest

from rlframe import handles
from rlframe.coordinator.messages import WorkerInfo
from rlframe.coordinator.operators.local import LocalOperator
from rlframe.coordinator.operators.reconciler import Backoff
from rlframe.coordinator.workers.records import Records, load_maker, save_workers
from rlframe.interprocess.processes import ProcessId, this_process
from tests.coordinator.operators import workers
from tests.coordinator.operators.driven import Driven
from tests.waiting import still_runs, wait_until

HERE = pathlib.Path(__file__).parent
AT_ONCE = Backoff(first=0.01)


@pytest.fixture
def state_dir(tmp_path: pathlib.Path):
    """A run's directory; whatever processes are recorded in it are killed in the end, should a test fail."""
    save_workers(tmp_path, {"learner": workers.quiet, "collector": workers.quiet})
    yield tmp_path
    for record in Records(tmp_path).all():
        if record.process.is_alive:
            os.killpg(record.pid, signal.SIGKILL)


class Local:
    """An operator, what it printed, and whether it left something."""

    def __init__(self, state_dir: pathlib.Path, backoff: Backoff = AT_ONCE, **options) -> None:
        self.output = io.StringIO()
        self.operator = Driven(LocalOperator(state_dir, output=self.output, **options), state_dir, backoff)

    def up(self, role: str, n: int, but: tuple[WorkerInfo, ...] = ()) -> list[WorkerInfo]:
        """Waits until `n` workers of the role serve, other than these, and returns them."""

        def serving() -> list[WorkerInfo]:
            infos = [info for info in self.operator.list() if info.role == role and info.key not in gone]
            return infos if len(infos) == n and all(info.address for info in infos) else []

        gone = {info.key for info in but}
        return wait_until(serving)


@pytest.fixture
def local(state_dir):
    made = []

    def make(**options) -> Local:
        made.append(Local(state_dir, **options))
        made[-1].operator.connect()
        return made[-1]

    yield make
    for each in made:
        each.operator.disconnect()


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(map(still_runs, processes))


def ping(info: WorkerInfo):
    return handles.Remote([info.address], info.worker_id, transport=LocalOperator.transport).ping()


def environ(info: WorkerInfo) -> dict[str, str]:
    return handles.Remote([info.address], info.worker_id, transport=LocalOperator.transport).resources()


def test_workers_are_spawned_and_serve_and_none_is_left_when_it_disconnects(local, state_dir):
    one = local()
    one.operator.request("collector", 2)
    first, second = one.up("collector", 2)
    assert [first.key, second.key] == [("collector/0", 0), ("collector/1", 0)]
    answer = ping(second)
    assert (answer.worker_id, answer.incarnation, answer.progress) == ("collector/1", 0, second.pid)
    with pytest.raises(Exception, match="not_a_call"):
        handles.Remote([first.address], first.worker_id, transport=LocalOperator.transport).not_a_call()
    assert "rlframe: collector 1" in psutil.Process(second.pid).cmdline()[0]
    processes = family(first.pid) + family(second.pid)
    assert len(processes) == 6  # each with a child, and what removes its socket when it is killed
    one.operator.disconnect()
    wait_until(lambda: are_gone(processes))
    assert Records(state_dir).all() == []
    lines = one.output.getvalue().splitlines()
    assert "[collector/1] collector/1 is up as incarnation 0" in lines and "[collector/1] closed" in lines
    one.operator.disconnect()  # once more does no harm


def test_one_that_is_killed_is_replaced_and_so_is_one_that_is_stopped_and_reported_however_often(local):
    one = local()
    one.operator.request("collector", 2)
    first, second = one.up("collector", 2)
    processes = family(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    replaced, other = one.up("collector", 2, but=(first,))
    assert replaced.key == ("collector/0", 1) and other == second
    wait_until(lambda: are_gone(processes))  # with what it had started
    assert "was killed by SIGKILL" in one.output.getvalue()

    processes = family(second.pid)
    os.kill(second.pid, signal.SIGSTOP)
    for _ in range(3):
        one.operator.report_failed([second.key])
    assert second.key not in [info.key for info in one.operator.list()]
    both = one.up("collector", 2, but=(first, second))
    assert [info.key for info in both] == [("collector/0", 1), ("collector/1", 1)]
    one.operator.report_failed([second.key])  # late, and of one that has been replaced
    assert [ping(info).incarnation for info in both] == [1, 1]
    assert one.operator.list() == both
    wait_until(lambda: are_gone(processes))


def test_released_workers_are_not_replaced_and_a_later_request_goes_on_with_their_incarnations(local):
    one = local()
    one.operator.request("collector", 2)
    first, second = one.up("collector", 2)
    one.operator.request("collector", 1)
    one.operator.request("collector", 1)
    assert one.operator.list() == [first, second]  # a request ends none
    processes = family(second.pid)
    one.operator.release([second.key])
    assert one.operator.list() == [first]
    wait_until(lambda: are_gone(processes))
    wait_until(lambda: "[collector/1] closed" in one.output.getvalue())  # it was given the time to
    one.operator.request("collector", 2)
    assert [info.key for info in one.up("collector", 2)] == [first.key, ("collector/1", 1)]


def test_workers_survive_a_coordinator_that_is_killed_and_its_successor_adopts_them(local, state_dir):
    me = this_process()
    coordinator = subprocess.Popen(
        [sys.executable, HERE / "adopted.py", state_dir, f"{me.pid}:{me.started}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert coordinator.stdout.readline() == "up\n"
    coordinator.kill()
    coordinator.wait()
    coordinator.stdout.close()

    one = local()
    adopted = one.operator.list()
    assert [info.key for info in adopted] == [("collector/0", 0), ("collector/1", 0)]
    assert [ping(info).progress for info in adopted] == [info.pid for info in adopted]
    one.operator.request("collector", 2)
    os.kill(adopted[0].pid, signal.SIGKILL)
    replaced, other = one.up("collector", 2, but=adopted[:1])
    assert replaced.key == ("collector/0", 1) and other == adopted[1]
    processes = family(other.pid)
    one.operator.disconnect()
    wait_until(lambda: are_gone(processes))
    assert Records(state_dir).all() == []


def test_workers_end_with_their_owner_or_when_nobody_calls(local, state_dir):
    owner = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    ownerless = local(owner=ProcessId.of(owner.pid), backoff=Backoff(first=600.0, longest=600.0))
    ownerless.operator.request("collector", 1)
    ownerless.operator.request("learner", 1)
    processes = family(ownerless.up("collector", 1)[0].pid) + family(ownerless.up("learner", 1)[0].pid)
    owner.kill()
    owner.wait()
    wait_until(lambda: are_gone(processes))
    wait_until(lambda: ownerless.output.getvalue().count(f"ends: its owner, process {owner.pid}, is gone") == 2)
    wait_until(lambda: "collector/0 ended by itself" in ownerless.operator.problems().get("collector/0", ""))
    ownerless.operator.disconnect()

    lonely = local(silence=0.4, backoff=Backoff(first=600.0, longest=600.0))
    lonely.operator.request("collector", 1)
    wait_until(lambda: "ends: nobody called for 0.4 s" in lonely.output.getvalue())
    wait_until(lambda: not Records(state_dir).all())


def test_a_worker_that_cannot_be_made_shows_its_traceback_and_is_tried_less_and_less_often(local, state_dir):
    lives = state_dir / "lives"
    save_workers(state_dir, {"collector": workers.Counts(str(lives))})
    one = local(backoff=Backoff(first=0.1, longest=600.0))
    one.operator.request("collector", 1)
    problem = wait_until(
        lambda: re.search(r".*[3-9] times in succession", one.operator.problems().get("collector/0", ""))
    )[0]
    assert lives.read_text().split()[:3] == ["0", "1", "2"]
    assert "failed with exit code 1" in problem and "RuntimeError: cannot live" in problem
    assert "[collector/0] RuntimeError: cannot live" in one.output.getvalue().splitlines()
    assert "[collector/0] Traceback (most recent call last):" in one.output.getvalue().splitlines()


@pytest.mark.system
def test_one_that_cannot_close_is_ended_all_the_same(local, state_dir):
    save_workers(state_dir, {"collector": workers.never_closes})
    one = local()
    one.operator.request("collector", 1)
    (info,) = one.up("collector", 1)
    processes = family(info.pid)
    began = time.monotonic()
    one.operator.disconnect()
    wait_until(lambda: are_gone(processes))
    assert Records(state_dir).all() == []
    assert time.monotonic() - began < 10.0


def test_an_incarnation_that_is_outdated_leaves_the_record_of_the_newer_one_alone(local, state_dir):
    one = local()
    one.operator.request("collector", 1)
    (first,) = one.up("collector", 1)
    one.operator.report_failed([first.key])
    (second,) = one.up("collector", 1, but=(first,))
    before = Records(state_dir).all()
    late = subprocess.run(
        [sys.executable, "-m", "rlframe.coordinator.workers.process", state_dir, "collector", "0", "0"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert late.returncode == 4 and "collector/0 has a newer incarnation than 0" in late.stderr
    assert Records(state_dir).all() == before
    assert ping(second).incarnation == 1


def test_accelerators_and_threads_are_the_learners_unless_told_otherwise(local, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("HIDDEN", "1")
    monkeypatch.delenv("NPROC", raising=False)
    one = local()
    one.operator.request("learner", 1)
    one.operator.request("collector", 1)
    learner, collector = environ(one.up("learner", 1)[0]), environ(one.up("collector", 1)[0])
    assert (learner["JAX_PLATFORMS"], learner["HIDDEN"], "NPROC" in learner) == ("cuda", "1", False)
    assert (collector["JAX_PLATFORMS"], collector["CUDA_VISIBLE_DEVICES"], collector["NPROC"]) == ("cpu", "", "1")
    one.operator.disconnect()
    one = local(env={"collector": {"HIDDEN": None, "NPROC": "3"}})
    one.operator.request("collector", 1)
    collector = environ(one.up("collector", 1)[0])
    assert (collector["NPROC"], collector["JAX_PLATFORMS"], "HIDDEN" in collector) == ("3", "cuda", False)


def test_what_cannot_be_pickled_and_what_is_not_a_role_are_refused(local, state_dir):
    with pytest.raises(ValueError, match="cannot be sent to their processes"):
        save_workers(state_dir, {"learner": lambda *_: threading.Lock(), "x": threading.Lock()})
    assert cloudpickle.loads((state_dir / "workers.pkl").read_bytes())["learner"] is workers.quiet  # as before
    with pytest.raises(ValueError, match="makes no workers of the role 'collector', only learner"):
        save_workers(state_dir, {"learner": workers.quiet})
        load_maker(state_dir, "collector")
