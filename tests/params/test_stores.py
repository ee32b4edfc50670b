"""What all param stores promise, in one process and between several."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.errors import CheckpointError, FencedError, PeerError, StoppedError, UnavailableError, UsageError
from rlframe.interprocess.memory import MACHINE
from rlframe.params import Attempt, FileParamStore, PackedParams, ParamStore, SharedParamStore
from rlframe.params import store as store_module
from rlframe.params.store import HPARAMS_BYTES
from tests.params import processes
from tests.params.processes import DEADLINE, Process, numbers_in, params

Make = Callable[..., ParamStore]


@pytest.fixture(params=["shared", "files"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    yield from make_of(request.param, tmp_path)


def make_of(kind: str, directory: Path) -> Iterator[Make]:
    made: list[ParamStore] = []

    def build(kept: int = 3) -> ParamStore:
        if kind == "shared":
            made.append(SharedParamStore(params(0), policy_ids=("main", "rival"), kept=kept))
        else:
            made.append(FileParamStore(directory, kept=kept))
        return made[-1]

    yield build
    for store in made:
        store.close()


def as_elsewhere(store: ParamStore) -> ParamStore:
    """The store, as another process has it."""
    return pickle.loads(pickle.dumps(store))


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(function: Any, *args: Any) -> Process:
        made.append(Process(function, *args))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def test_what_was_put_is_what_comes_back(make: Make) -> None:
    store = make()
    assert store.get("main") is None
    assert store.newest("main") == -1
    store.put("main", 0, params(5), {"epsilon": 0.5, "name": "five"})
    found = store.get("main")
    assert (found.version, found.hparams) == (0, {"epsilon": 0.5, "name": "five"})
    assert numbers_in(found.params) == {5}
    for leaf, put in zip(found.params["layers"], params(5)["layers"]):
        assert (leaf.shape, leaf.dtype) == (put.shape, put.dtype)
    store.put("main", 1, {**params(6), "bias": jnp.full(7, 6, jnp.int32)})  # an array of a device
    assert store.get("main").hparams is None
    assert numbers_in(store.get("main").params) == {6}


def test_the_newest_are_kept_and_found_by_their_versions(make: Make) -> None:
    store = make(kept=3)
    for version in (2, 3, 7, 11, 12):
        store.put("main", version, params(version))
        assert store.newest("main") == version
    assert store.versions("main") == [7, 11, 12]
    assert [store.get("main", version=v) for v in (2, 3, 8, 13)] == [None] * 4
    for version in (7, 11, 12):
        found = store.get("main", version=version)
        assert (found.version, numbers_in(found.params)) == (version, {version})
    assert store.get("main", min_version=12).version == 12
    assert store.get("main", min_version=13) is None


def test_a_pinned_version_outlasts_those_that_come_after_it_until_it_is_let_go(make: Make) -> None:
    store = make(kept=2)
    assert store.pin("main") == -1
    store.put("main", 1, params(1))
    assert store.pin("main") == 1
    for version in range(2, 9):
        store.put("main", version, params(version))
    assert store.versions("main") == [1, 7, 8]
    found = store.get("main", version=1)
    assert found is not None
    assert numbers_in(found.params) == {1.0}
    assert store.get("main").version == 8  # type: ignore[union-attr]

    store.unpin("main", 1)
    store.unpin("main", 1)
    assert store.versions("main") == [7, 8]
    assert store.get("main", version=1) is None


def test_of_too_many_pins_the_oldest_is_let_go(make: Make) -> None:
    store = make(kept=1)
    for version in range(6):
        store.put("main", version, params(version))
        assert store.pin("main") == version
        assert store.pin("main") == version
    store.put("main", 6, params(6))
    assert store.versions("main") == [4, 5, 6]


@pytest.mark.parametrize("version", [0, 6, 7])
def test_a_version_that_does_not_rise_is_refused(make: Make, version: int) -> None:
    store = make()
    store.put("main", 7, params(7))
    with pytest.raises(UsageError, match=f"Version {version} of policy 'main' was put, but version 7 is there"):
        as_elsewhere(store).put("main", version, params(9))
    assert store.versions("main") == [7]
    assert numbers_in(store.get("main").params) == {7}
    with pytest.raises(UsageError, match="start at 0"):
        store.put("main", -1, params(0))


def test_an_older_attempt_puts_no_more_once_a_newer_one_has_opened_the_policy(make: Make) -> None:
    store = make()
    old, new = Attempt(1, 0), Attempt(1, 1)
    assert store.opened("main") is None
    store.open("main", old)
    store.put("main", 5, params(5), attempt=old)
    other = as_elsewhere(store)
    other.open("main", new)
    other.open("main", new)  # a repetition
    assert store.opened("main") == new
    for version in (6, 5):  # above the newest, or not: that it is fenced comes first
        with pytest.raises(FencedError, match="Attempt 0 of epoch 1 is fenced off: policy 'main' was"):
            store.put("main", version, params(6), attempt=old)
    for refused in (store.check, store.open):
        with pytest.raises(FencedError, match="attempt 1 of epoch 1, which goes on"):
            refused("main", old)
    assert (store.opened("main"), store.versions("main")) == (new, [5])
    store.check("main", new)
    other.put("main", 6, params(6), attempt=new)
    assert store.versions("main") == [5, 6]


def test_attempts_only_rise_and_the_epoch_comes_first(make: Make) -> None:
    store = make()
    rising = [Attempt(0, 0), Attempt(0, 7), Attempt(3, 0), Attempt(3, 1), Attempt(2**41, 0)]
    for i, attempt in enumerate(rising):
        store.open("main", attempt)
        assert store.opened("main") == attempt
        for older in rising[:i]:
            with pytest.raises(FencedError):
                store.open("main", older)
            with pytest.raises(FencedError):
                store.check("main", older)
        assert store.opened("main") == attempt


def test_a_policy_that_nobody_opened_takes_what_anybody_puts_and_one_that_was_opened_does_not(make: Make) -> None:
    store = make()
    store.open("main", Attempt(1, 0))
    store.put("rival", 1, params(1))
    store.check("rival", None)
    store.put("rival", 2, params(2), attempt=Attempt(0, 0))
    assert (store.opened("rival"), store.versions("rival")) == (None, [1, 2])
    with pytest.raises(FencedError, match="opened by attempt 0 of epoch 1, and is put by that alone. Who puts it by"):
        store.put("main", 1, params(1))
    assert store.versions("main") == []


def test_a_process_that_wakes_up_late_is_fenced_and_its_successor_goes_on(
    make: Make, process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT", 0.2)
    store = make()
    old = process(processes.wake, store, 1, (1, 0))
    assert old.hear() == "puts"
    with stopped_outside_a_put(store, old):
        new = Attempt(1, 1)
        store.open("main", new)
        newest = store.newest("main")
        store.put("main", newest + 1, params(newest + 1), attempt=new)
    while (said := old.hear()) == "puts":
        pass
    assert said[0] == "FencedError" and "attempt 1 of epoch 1" in said[1]
    assert store.newest("main") == newest + 1
    store.put("main", newest + 2, params(newest + 2), attempt=new)
    assert old.popen.wait(DEADLINE) == 0  # the fence outlives whom it keeps out
    assert numbers_in(store.get("main").params) == {newest + 2}


@contextlib.contextmanager
def stopped_outside_a_put(store: ParamStore, process: Process) -> Iterator[None]:
    """SIGSTOP; where it hits a put, which others wait for, the process goes on for a moment."""
    deadline, here = time.monotonic() + DEADLINE, pickle.loads(pickle.dumps(store))
    while True:
        assert time.monotonic() < deadline
        os.kill(process.popen.pid, signal.SIGSTOP)
        try:
            here.pin("main")  # it takes the lock
            break
        except PeerError:
            os.kill(process.popen.pid, signal.SIGCONT)
    yield
    os.kill(process.popen.pid, signal.SIGCONT)


def test_the_fence_in_files_outlives_those_who_set_it_and_lets_the_next_session_in(tmp_path: Path) -> None:
    first = FileParamStore(tmp_path)
    first.open("main", Attempt(1_000, 4))
    first.put("main", 1, params(1), attempt=Attempt(1_000, 4))
    first.close()
    later = FileParamStore(tmp_path)
    with pytest.raises(FencedError):
        later.put("main", 2, params(2), attempt=Attempt(1_000, 3))
    session = Attempt(2_000, 0)  # its attempts begin anew
    later.open("main", session)
    later.put("main", 2, params(2), attempt=session)
    assert later.versions("main") == [1, 2]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b'{"epoch": "x", "number": 1}'])
def test_a_damaged_fence_is_named_and_lets_nobody_put(tmp_path: Path, content: bytes) -> None:
    store = FileParamStore(tmp_path)
    store.open("main", Attempt(1, 0))
    (tmp_path / "main" / "opened.json").write_bytes(content)
    for attempt in (None, Attempt(1, 0)):
        with pytest.raises(CheckpointError, match=r"opened\.json is damaged: .*which attempt may put.*Remove it"):
            store.put("main", 1, params(1), attempt=attempt)
    assert store.versions("main") == []


def test_policies_do_not_know_of_each_other(make: Make) -> None:
    store = make(kept=1)
    store.put("main", 4, params(4))
    store.put("rival", 2, params(2))
    store.put("rival", 3, params(3))
    assert (store.versions("main"), store.versions("rival")) == ([4], [3])
    assert numbers_in(store.get("main").params) == {4}
    assert numbers_in(store.get("rival").params) == {3}


def test_what_comes_back_is_the_callers_own(make: Make) -> None:
    store = make(kept=1)
    put = params(1)
    store.put("main", 1, put)
    put["table"][:] = 9
    first = store.get("main").params
    first["bias"] += 1
    first["table"][:] = 8
    assert numbers_in(store.get("main").params) == {1}
    kept = store.get("main").params
    store.put("main", 2, params(2))
    store.put("main", 3, params(3))
    assert numbers_in(kept) == {1}


def test_a_source_answers_as_a_learner_does(make: Make) -> None:
    store = make()
    source = as_elsewhere(store).source("main")
    assert source.get_params() == (-1, None)
    assert source.wait_for_version(-1, 0.01) == -1
    store.put("main", 3, params(3))
    version, tree = source.get_params(-1)
    assert (version, numbers_in(tree)) == (3, {3})
    assert source.get_params(3) == (3, None)
    assert source.wait_for_version(2, 1.0) == 3
    store.put("main", 5, params(5))
    assert source.get_params(3)[0] == 5


def test_who_waits_is_told_at_once(
    make: Make, process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    store.put("main", 1, params(1))
    began = time.monotonic()
    assert store.wait_for_version("main", 1, 100.0) == 1
    assert 0.9 < time.monotonic() - began < DEADLINE  # no longer than a learner would have it wait
    monkeypatch.setattr(store_module, "LONGEST_WAIT", 2 * DEADLINE)
    writer = process(processes.write, store, 2, 2)
    began = time.monotonic()
    assert store.wait_for_version("main", 1, 2 * DEADLINE) == 2
    assert time.monotonic() - began < DEADLINE
    assert (writer.hear(), writer.hear()) == ("begins", [1, 2])


def test_packed_parameters_travel_untouched(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store, packed = make(), PackedParams.of(params(4))
    for name in ("pack_numpy", "unpack_numpy"):
        monkeypatch.setattr(f"rlframe.params.packing.Packing.{name}", lambda *_: pytest.fail("packed or unpacked"))
    store.put("main", 4, packed)
    version, found = as_elsewhere(store).source("main").get_packed()
    assert version == 4 and found is not None and found.packing == packed.packing
    for there, put in zip(found.arrays, packed.arrays):
        assert there.dtype == put.dtype
        np.testing.assert_array_equal(there, put)


def test_close_ends_a_wait(make: Make) -> None:
    store = make()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            while True:
                store.wait_for_version("main", -1, 1.0)
        except StoppedError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    store.close()
    store.close()
    thread.join(DEADLINE)
    assert "closed while a version of 'main' was waited for" in str(raised[0])
    with pytest.raises(StoppedError, match="closed before version 1"):
        store.put("main", 1, params(1))


@pytest.mark.parametrize("hparams", [{"x": "y" * HPARAMS_BYTES}, {"x": np.zeros(3)}])
def test_hparams_that_are_none_are_refused(make: Make, hparams: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="hparams of policy 'main'"):
        make().put("main", 1, params(1), hparams)


@pytest.mark.parametrize("make", ["shared", pytest.param("files", marks=pytest.mark.system)], indirect=True)
def test_a_second_process_never_sees_half_a_version(make: Make, process: Callable[..., Process]) -> None:
    store = make(kept=1)  # the one that is read is overwritten after the next
    reader = process(processes.read, store, 100)
    writer = process(processes.write, store, 0, 1_000_000)  # until the test ends
    assert (reader.hear(), writer.hear()) == ("begins", "begins")
    assert reader.hear() == [100, []]


@pytest.mark.system
def test_a_writer_that_dies_in_a_put_leaves_the_newest_and_another_goes_on(
    make: Make, process: Callable[..., Process]
) -> None:
    store = make(kept=2)
    for version in (1, 2, 3):
        store.put("main", version, params(version), {"version": version})
    for version in (4, 5, 6, 7):  # more often than there is room for what they leave behind
        dying = process(processes.stand_in_a_put, store, version)
        assert dying.hear() == "in the middle"
        assert store.versions("main") == [2, 3]
        dying.kill()
        assert store.versions("main") == [2, 3]
        assert numbers_in(store.get("main").params) == {3}
    following = process(processes.write, store, 4, 6)
    assert (following.hear(), following.hear()) == ("begins", [5, 6])
    for version in (5, 6):
        assert numbers_in(store.get("main", version=version).params) == {version}


@pytest.mark.system
def test_a_writer_killed_at_any_moment_leaves_whole_versions(make: Make, process: Callable[..., Process]) -> None:
    store, newest = make(kept=2), -1
    for _ in range(4):
        writer = process(processes.write, store, newest + 1, 10**6)
        assert writer.hear() == "begins"
        wanted, deadline = newest + 5, time.monotonic() + DEADLINE
        while (newest := store.wait_for_version("main", wanted, 1.0)) <= wanted:
            assert time.monotonic() < deadline
        writer.kill()
        newest = store.newest("main")
        for version in store.versions("main"):
            found = store.get("main", version=version)
            assert numbers_in(found.params) == {version} == {found.hparams["version"]}
    assert newest >= 20


def test_other_trees_are_refused_by_name() -> None:
    store = SharedParamStore(params(0))
    wrong = {**params(1), "layers": (np.zeros((3, 4), np.float32), np.zeros((), np.float32))}
    with pytest.raises(UsageError, match=r"parameters\['layers'\]\[0\] that were put are float32\[3, 4\].*\[3, 5\]"):
        store.put("main", 1, wrong)
    with pytest.raises(UsageError, match="no tree as the param store's"):
        store.put("main", 1, {"bias": np.zeros(7, np.int32)})
    with pytest.raises(UsageError, match="made for the policies 'main'; it cannot hold 'other'"):
        store.source("other")
    assert store.newest("main") == -1
    store.close()


def test_a_store_whose_maker_has_closed_it_says_so() -> None:
    store = SharedParamStore(params(0))
    copy, early = pickle.dumps(store), pickle.loads(pickle.dumps(store))
    store.put("main", 1, params(1))
    assert early.newest("main") == 1
    store.close()
    assert numbers_in(early.get("main").params) == {1}  # who has it open can still read
    with pytest.raises(UnavailableError, match="has ended or closed it"):
        pickle.loads(copy).get("main")


def test_memory_of_another_ray_node_is_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MACHINE, "one")
    store = SharedParamStore(params(0))
    elsewhere = pickle.dumps(store)
    monkeypatch.setenv(MACHINE, "other")
    with pytest.raises(UsageError, match=r"memory of another Ray node.* a FileParamStore needs no such memory"):
        pickle.loads(elsewhere).get("main")
    monkeypatch.setenv(MACHINE, "one")
    store.close()


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda content: b"", "no policy that rlframe wrote"),
        (lambda content: b"something else", "no policy that rlframe wrote"),
        (lambda content: content[:-9], "is damaged"),
        (lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:], "is damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, spoil: Callable[[bytes], bytes], match: str) -> None:
    store = FileParamStore(tmp_path)
    store.put("main", 1, params(1))
    store.put("main", 2, params(2))
    path = tmp_path / "main" / "000000000002.params"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CheckpointError, match=f"{path.name} .*{match}"):
        store.get("main")
    assert numbers_in(store.get("main", version=1).params) == {1}
    store.put("main", 3, params(3))
    assert numbers_in(store.get("main").params) == {3}


def test_a_file_of_another_version_or_policy_is_refused_and_others_are_left_alone(tmp_path: Path) -> None:
    store = FileParamStore(tmp_path, kept=2)
    store.put("main", 1, params(1))
    (tmp_path / "main" / "000000000001.params").rename(tmp_path / "main" / "000000000009.params")
    (tmp_path / "main" / "notes.txt").write_text("mine")
    assert store.versions("main") == [9]
    with pytest.raises(CheckpointError, match="holds version 1 of policy 'main': it was moved"):
        store.get("main")
    for version in (10, 11, 12):
        store.put("main", version, params(version))
    assert sorted(path.name for path in (tmp_path / "main").iterdir()) == [
        ".lock",
        "000000000011.params",
        "000000000012.params",
        "notes.txt",
    ]
    with pytest.raises(UsageError, match="name of a policy"):
        store.put("../main", 1, params(1))
