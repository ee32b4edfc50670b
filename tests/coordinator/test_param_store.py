"""Tests of the param store, in its process and through handles."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.coordinator import param_store as param_store
from rlframe.coordinator.param_store import Attempt, ParamStore
from rlframe.errors import FencedError, StoppedError, UsageError
from rlframe.params import PackedParams
from rlframe.params.reader import ParamReader
from rlframe.shutdown import register_program
from tests.params import processes
from tests.params.processes import DEADLINE, Process, numbers_in, params

Make = Callable[..., ParamStore]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ParamStore] = []

    def build(kept: int = 3) -> ParamStore:
        made.append(ParamStore(kept))
        return made[-1]

    yield build
    for store in made:
        store.close()


def as_elsewhere(store: ParamStore) -> Any:
    """Return a copy of the store, as another process would receive it."""
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


def test_get_returns_the_parameters_that_were_put(make: Make) -> None:
    store = make()
    assert store.get("main") is None
    assert store.newest_version("main") == -1
    store.put("main", 0, params(5), {"epsilon": 0.5, "name": "five"})
    for found in (store.get("main"), as_elsewhere(store).get("main")):
        assert (found.version, found.hparams) == (0, {"epsilon": 0.5, "name": "five"})
        assert numbers_in(found.params) == {5}
        for leaf, put in zip(found.params["layers"], params(5)["layers"]):
            assert (leaf.shape, leaf.dtype) == (put.shape, put.dtype)
    store.put("main", 1, {**params(6), "bias": jnp.full(7, 6, jnp.int32)})  # `bias` is a JAX array on a device
    assert store.get("main").hparams is None
    assert numbers_in(store.get("main").params) == {6}


def test_newest_versions_are_kept(make: Make) -> None:
    store = make(kept=3)
    for version in (2, 3, 7, 11, 12):
        store.put("main", version, params(version))
        assert store.newest_version("main") == version
    assert store.versions("main") == [7, 11, 12]
    assert [store.get("main", version=v) for v in (2, 3, 8, 13)] == [None] * 4
    for version in (7, 11, 12):
        found = store.get("main", version=version)
        assert (found.version, numbers_in(found.params)) == (version, {version})
    assert store.get("main", min_version=12).version == 12
    assert store.get("main", min_version=13) is None


def test_pinned_version_is_kept_until_unpin(make: Make) -> None:
    store = make(kept=2)
    assert store.pin("main") == -1
    store.put("main", 1, params(1))
    assert store.pin("main") == 1
    for version in range(2, 9):
        store.put("main", version, params(version))
    assert store.versions("main") == [1, 7, 8]
    assert numbers_in(store.get("main", version=1).params) == {1}
    assert store.get("main").version == 8

    store.unpin("main", 1)
    store.unpin("main", 1)
    assert store.versions("main") == [7, 8]
    assert store.get("main", version=1) is None


def test_third_pin_removes_the_oldest_pin(make: Make) -> None:
    store = make(kept=1)
    for version in range(6):
        store.put("main", version, params(version))
        assert store.pin("main") == version
        assert store.pin("main") == version
    store.put("main", 6, params(6))
    assert store.versions("main") == [4, 5, 6]


@pytest.mark.parametrize("version", [0, 6, 7])
def test_version_that_does_not_rise_is_refused(make: Make, version: int) -> None:
    store = make()
    store.put("main", 7, params(7))
    with pytest.raises(UsageError, match=f"Version {version} of policy 'main' is not above the newest version 7"):
        as_elsewhere(store).put("main", version, params(9))
    assert store.versions("main") == [7]
    assert numbers_in(store.get("main").params) == {7}
    with pytest.raises(UsageError, match="start at 0"):
        store.put("main", -1, params(0))


def test_repeated_put_of_the_same_attempt_changes_nothing(make: Make) -> None:
    store, attempt = make(), Attempt(1, 0)
    store.open_policy("main", attempt)
    for _ in range(2):  # as if the first reply was lost and the call was repeated
        store.put("main", 4, params(4), attempt=attempt)
    assert store.versions("main") == [4]
    store.open_policy("main", Attempt(1, 1))
    with pytest.raises(UsageError, match="is not above the newest version 4"):
        store.put("main", 4, params(9), attempt=Attempt(1, 1))


def test_older_attempt_is_fenced_off_by_a_newer_attempt(make: Make) -> None:
    store = make()
    old, new = Attempt(1, 0), Attempt(1, 1)
    store.open_policy("main", old)
    store.put("main", 5, params(5), attempt=old)
    other = as_elsewhere(store)
    other.open_policy("main", new)
    other.open_policy("main", new)  # a repeated call
    for version in (6, 5):  # the store checks the attempt before the version
        with pytest.raises(FencedError, match="Attempt 0 of epoch 1 is fenced off: policy 'main' was"):
            store.put("main", version, params(6), attempt=old)
    for refused in (store.check_not_fenced, store.open_policy, other.check_not_fenced):
        with pytest.raises(FencedError, match="attempt 1 of epoch 1, which continues"):
            refused("main", old)
    assert store.versions("main") == [5]
    store.check_not_fenced("main", new)
    other.put("main", 6, params(6), attempt=new)
    assert store.versions("main") == [5, 6]


def test_attempts_are_ordered_by_epoch_first(make: Make) -> None:
    store = make()
    rising = [Attempt(0, 0), Attempt(0, 7), Attempt(3, 0), Attempt(3, 1), Attempt(2**41, 0)]
    for i, attempt in enumerate(rising):
        store.open_policy("main", attempt)
        for older in rising[:i]:
            with pytest.raises(FencedError):
                store.open_policy("main", older)
            with pytest.raises(FencedError):
                store.check_not_fenced("main", older)
        store.check_not_fenced("main", attempt)


def test_only_an_opened_policy_requires_an_attempt(make: Make) -> None:
    store = make()
    store.open_policy("main", Attempt(1, 0))
    store.put("rival", 1, params(1))
    store.check_not_fenced("rival", None)
    store.put("rival", 2, params(2), attempt=Attempt(0, 0))
    assert store.versions("rival") == [1, 2]
    with pytest.raises(FencedError, match="opened by attempt 0 of epoch 1, and only that attempt may put versions"):
        store.put("main", 1, params(1))
    assert store.versions("main") == []


def test_restarted_store_refuses_attempts_older_than_its_first_writer(make: Make) -> None:
    restarted = make()
    restarted.put("main", 8, params(8), attempt=Attempt(1, 1))
    with pytest.raises(FencedError):
        restarted.put("main", 9, params(9), attempt=Attempt(1, 0))
    assert restarted.versions("main") == [8]


def test_policies_are_independent(make: Make) -> None:
    store = make(kept=1)
    store.put("main", 4, params(4))
    store.put("rival", 2, params(2))
    store.put("rival", 3, params(3))
    assert (store.versions("main"), store.versions("rival")) == ([4], [3])
    assert numbers_in(store.get("main").params) == {4}
    assert numbers_in(store.get("rival").params) == {3}


def test_returned_parameters_are_copies(make: Make) -> None:
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


@pytest.mark.parametrize("elsewhere", [False, True])
def test_param_reader_behaves_like_a_learner(make: Make, elsewhere: bool) -> None:
    store = make()
    reader = ParamReader(as_elsewhere(store) if elsewhere else store, "main")
    assert reader.get_params() == (-1, None)
    assert reader.wait_for_version(-1, 0.01) == -1
    store.put("main", 3, params(3))
    version, tree = reader.get_params(-1)
    assert (version, numbers_in(tree)) == (3, {3})
    assert reader.get_params(3) == (3, None)
    assert reader.wait_for_version(2, 1.0) == 3
    store.put("main", 5, params(5))
    assert pickle.loads(pickle.dumps(reader)).get_params(3)[0] == reader.get_params(3)[0] == 5


def test_wait_returns_as_soon_as_a_new_version_arrives(
    make: Make, process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    store.put("main", 1, params(1))
    began = time.monotonic()
    assert store.wait_for_version("main", 1, 100.0) == 1
    assert 0.9 < time.monotonic() - began < DEADLINE  # one wait is limited to LONGEST_WAIT seconds
    monkeypatch.setattr(param_store, "LONGEST_WAIT", 2 * DEADLINE)
    writer = process(processes.write, store, 2, 2)
    began = time.monotonic()
    assert store.wait_for_version("main", 1, 2 * DEADLINE) == 2
    assert time.monotonic() - began < DEADLINE
    assert (writer.read_line(), writer.read_line()) == ("begins", [1, 2])


def test_packed_parameters_are_not_repacked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store, packed = make(), PackedParams.of(params(4))
    for name in ("pack_numpy", "unpack_numpy"):
        monkeypatch.setattr(f"rlframe.params.packing.Packing.{name}", lambda *_: pytest.fail("packed or unpacked"))
    elsewhere = as_elsewhere(store)
    elsewhere.put("main", 4, packed)
    for found in (elsewhere.get("main").packed, ParamReader(elsewhere, "main").get_packed()[1]):
        assert found.packing == packed.packing
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
    assert "closed while a caller waited for a version of 'main'" in str(raised[0])
    with pytest.raises(StoppedError, match="closed before version 1"):
        store.put("main", 1, params(1))


def test_hparams_that_are_not_json_values_are_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="hparams of policy 'main'"):
        make().put("main", 1, params(1), {"x": np.zeros(3)})


def test_different_parameter_trees_are_refused(make: Make) -> None:
    store = make()
    store.put("main", 0, params(0))
    wrong = {**params(1), "layers": (np.zeros((3, 4), np.float32), np.zeros((), np.float32))}
    with pytest.raises(UsageError, match=r"parameters\['layers'\]\[0\] are float32\[3, 4\].*\[3, 5\]"):
        store.put("main", 1, wrong)
    with pytest.raises(UsageError, match="tree of the new parameters differs from earlier versions"):
        store.put("main", 1, {"bias": np.zeros(7, np.int32)})
    assert store.newest_version("main") == 0


def test_run_waits_for_finish_after_the_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.shutdown._program", None)
    ends = threading.Event()
    register_program(ends, lambda: None)
    store = ParamStore(at_end=DEADLINE)
    node = threading.Thread(target=store.run)
    node.start()
    ends.set()
    node.join(0.5)
    assert node.is_alive()
    store.put("main", 1, params(1))
    store.finish()
    store.finish()
    node.join(DEADLINE)
    assert not node.is_alive()
    impatient = ParamStore()  # without `at_end`, `run` returns at once
    impatient.run()


@pytest.mark.system
def test_writer_killed_at_any_time_leaves_complete_versions(make: Make, process: Callable[..., Process]) -> None:
    store, newest = make(kept=2), -1
    for _ in range(4):
        writer = process(processes.write, store, newest + 1, 10**6)
        assert writer.read_line() == "begins"
        wanted, deadline = newest + 5, time.monotonic() + DEADLINE
        while (newest := store.wait_for_version("main", wanted, 1.0)) <= wanted:
            assert time.monotonic() < deadline
        writer.kill()
        newest = store.newest_version("main")
        for version in store.versions("main"):
            found = store.get("main", version=version)
            assert numbers_in(found.params) == {version} == {found.hparams["version"]}
    assert newest >= 20
