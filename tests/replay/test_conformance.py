"""What every replay buffer promises, checked against one in plain Python."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.replay import ReplayBuffer
from rlframe.types import Sequence, Transition, global_env_ids
from tests.replay.factories import FACTORIES, local, reverb, shared_memory
from tests.replay.streams import Stream, Twin, assert_batch_matches, fake_agent, first_ids
from tests.waiting import wait_until

ITEMS = [
    Transition(1),
    Transition(3, 0.9),
    Transition(5, 0.97),
    Sequence(4),
    Sequence(5, period=2),
    Sequence(2, period=3),
    Sequence(1),
]
SCENES = ["lockstep", "subsets", "broken fragments", "two writers", "reclaimed rank", "one slow environment"]


# Every third of them in `make test`. The buffer in memory, which completes the items of Reverb, goes through every
# scene; Reverb, with a server for each, only through those.
EACH_SCENE = pytest.mark.parametrize(
    ("make", "item", "scene"),
    [
        pytest.param(
            *(factory, item, scene),
            id=f"{factory.__name__}-{item}-{scene}",
            marks=[pytest.mark.system] if (i + j) % 3 else [],
        )
        for factory in FACTORIES
        for i, item in enumerate(ITEMS)
        for j, scene in enumerate(SCENES)
        if factory is not reverb or (i + j) % 3 == 0
    ],
    indirect=["make"],
)
# A Reverb server takes no seed, and gives no items by their keys.
NOT_REVERB = pytest.mark.parametrize("make", [local, shared_memory], indirect=True, ids=["local", "shared_memory"])


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.__name__)
def make(request: pytest.FixtureRequest) -> Any:
    made = []

    def build(*args: Any, seed: int = 0, writers: int = 1, **kwargs: Any) -> Any:
        made.append(request.param(fake_agent(*args, **kwargs), seed=seed, writers=writers))
        return made[-1]

    build.is_reverb = request.param is reverb
    yield build
    for buffer in made:
        buffer.close()


def writers(scene: str) -> int:
    """How many there are."""
    return 2 if scene == "two writers" else 1


def play(scene: str, buffer: Any, twin: Twin, steps: int, num_envs: int = 6, seed: int = 0, end: float = 0.2) -> Any:
    """Feeds buffer and twin with the same experience; yields after every step."""
    rng = np.random.default_rng(seed)
    streams = [Stream(num_envs, rank, seed, end) for rank in range(writers(scene))]
    for stream in streams:
        assert buffer.claim_rank(stream.num_envs, stream.rank) == (stream.rank, 0)
        twin.claim_rank(stream.num_envs, stream.rank)
    for t in range(steps):
        stream = streams[int(rng.integers(len(streams)))]
        envs = None
        if scene == "subsets":
            envs = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)]
        elif scene == "broken fragments" and rng.random() < 0.3:
            stream.restart(rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)], unless_first=True)
        elif scene == "reclaimed rank" and t % 11 == 10:
            stream.restart(np.arange(num_envs))
            assert buffer.claim_rank(num_envs, 0) == (0, (t + 1) // 11)
            twin.claim_rank(num_envs, 0)
        elif scene == "one slow environment" and t % 9:
            envs = np.arange(1, num_envs)
        ids, step = stream.step(envs)
        buffer.add(ids, step)
        twin.add(ids, step)
        yield t


@pytest.mark.parametrize("kind", ["uniform", "prioritised"])
@EACH_SCENE
def test_every_sampled_item_is_one_that_was_added(make: Any, item: Any, scene: str, kind: str) -> None:
    buffer, twin = make(kind, item, 8, 10_000, writers=writers(scene)), Twin(item)
    for _ in play(scene, buffer, twin, 40):
        assert buffer.size == len(twin.items)
        batch = buffer.sample()
        assert (batch is None) == (not twin.items)
        if batch is not None:
            assert_batch_matches(batch, twin)
            np.testing.assert_allclose(batch.probabilities, 1 / len(twin.items), rtol=1e-6)


@EACH_SCENE
def test_a_queue_gives_each_item_once_and_in_order(make: Any, item: Any, scene: str) -> None:
    buffer, twin, seen = make("queue", item, 4, 10_000, writers=writers(scene)), Twin(item), []
    for _ in play(scene, buffer, twin, 40):
        while (batch := buffer.sample()) is not None:
            assert_batch_matches(batch, twin)
            seen += first_ids(batch).tolist()
        assert buffer.size == len(twin.items) - len(seen) < 4
    order = {first: i for i, first in enumerate(twin.items)}
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(order)
    # A call may complete several items, whose order among each other is free.
    assert max((abs(order[first] - i) for i, first in enumerate(seen)), default=0) <= 6 * 5


@pytest.mark.parametrize("kind", ["uniform", "queue", "prioritised"])
@EACH_SCENE
def test_a_full_buffer_keeps_the_newest_steps(make: Any, item: Any, scene: str, kind: str) -> None:
    capacity, num_envs = 96, 6
    buffer, twin = make(kind, item, 4, capacity, writers=writers(scene)), Twin(item)
    sampled = 0
    for t in play(scene, buffer, twin, 140):
        if t % 30 == 29:
            batch = buffer.sample()
            if batch is not None:
                assert_batch_matches(batch, twin)
                sampled += 4
    stats = buffer.stats()
    # An item whose first step left before its last one came is never there.
    slow = scene in ("one slow environment", "two writers")
    assert stats["added"] <= len(twin.items) if slow else stats["added"] == len(twin.items)
    assert stats["added"] == stats["items"] + stats["evicted"] + (sampled if kind == "queue" else 0)
    assert stats["evicted"] > 0
    if kind != "queue":
        drawn: set[int] = set()
        for _ in range(2000):  # 200 will do, but where no seed decides
            drawn.update(first_ids(buffer.sample()).tolist())
            if len(drawn) == stats["items"]:
                break
        if make.is_reverb:  # counts items, which leave in the order in which they were completed, but those of one call
            at_once = num_envs * getattr(item, "n_step", 1)
            must_stay = set(list(twin.items)[len(twin.items) - max(0, stats["items"] - at_once) :])
        else:  # a buffer may divide its capacity among its writers
            newest = {first for seen in twin.seen.values() for first in seen[-capacity // writers(scene) :]}
            must_stay = {first for first in newest & twin.items.keys() if first >= Stream.next_id - capacity}
        assert must_stay <= drawn
        assert len(drawn) == stats["items"]


@pytest.mark.parametrize("item", [Transition(1), Transition(3)], ids=str)
def test_an_environment_that_is_back_after_its_steps_left_begins_anew(make: Any, item: Any) -> None:
    buffer, twin, stream = make("uniform", item, 8, 40), Twin(item), Stream(4, end=0.1)
    buffer.claim_rank(4)
    twin.claim_rank(4, 0)
    for t in range(300):
        ids, step = stream.step(np.arange(0 if t % 30 < 5 else 1, 4))
        buffer.add(ids, step)
        twin.add(ids, step)
        if (batch := buffer.sample()) is not None:
            assert_batch_matches(batch, twin)


def test_every_item_is_drawn_with_the_same_chance(make: Any) -> None:
    buffer, twin = make("uniform", Transition(3), 100, 200), Twin(Transition(3))
    for _ in play("subsets", buffer, twin, 200):
        pass
    size = buffer.size
    ids, counts = np.unique(np.concatenate([first_ids(buffer.sample()) for _ in range(400)]), return_counts=True)
    expected = 40_000 / size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert len(ids) == size
    assert abs(chi_square - size) < 5 * np.sqrt(2 * size)


def test_items_are_drawn_by_their_priorities(make: Any) -> None:
    buffer, twin = make("prioritised", Transition(2), 50, 400, priority_exponent=0.5), Twin(Transition(2))
    for _ in play("subsets", buffer, twin, 100):
        pass
    priorities: dict[int, float] = {}
    for _ in range(400):  # every item gets the priority that its observation's number says
        batch = buffer.sample()
        ids = first_ids(batch)
        buffer.update_priorities(batch.keys, (ids % 7 + 0.5) ** 2)
        priorities.update(zip(ids.tolist(), ((ids % 7) + 0.5).tolist()))
    assert len(priorities) == buffer.size
    total, counts = sum(priorities.values()), dict.fromkeys(priorities, 0)
    for _ in range(400):
        batch = buffer.sample()
        for first, probability in zip(first_ids(batch).tolist(), batch.probabilities):
            assert probability == pytest.approx(priorities[first] / total, rel=1e-5)
            counts[first] += 1
    expected = {first: 20_000 * priority / total for first, priority in priorities.items()}
    chi_square = sum((counts[first] - expected[first]) ** 2 / expected[first] for first in priorities)
    assert chi_square < len(priorities) + 5 * np.sqrt(2 * len(priorities))


def test_a_new_item_has_the_highest_priority_so_far(make: Any) -> None:
    buffer = make("prioritised", Transition(1), 64, 400, priority_exponent=1.0)
    buffer.claim_rank(1)
    stream = Stream(1, end=0.0)
    buffer.add(*stream.step())
    buffer.update_priorities(buffer.sample().keys[:1], np.array([3.0]))
    buffer.add(*stream.step())
    np.testing.assert_allclose(buffer.sample().probabilities, 0.5)
    batch = buffer.sample()
    older = batch.keys[batch.keys[:, 2].argmin()]
    buffer.update_priorities(older[None], np.array([1.0]))
    assert set(np.round(buffer.sample().probabilities, 6)) == {np.float32(0.25), np.float32(0.75)}


def test_late_priorities_are_dropped_and_counted(make: Any) -> None:
    buffer, stream = make("prioritised", Transition(1), 8, 50), Stream(2)
    buffer.claim_rank(2)
    for _ in range(10):
        buffer.add(*stream.step())
    old = buffer.sample().keys
    for _ in range(100):
        buffer.add(*stream.step())
    before = buffer.sample().probabilities
    buffer.update_priorities(old, np.full(8, 100.0))
    assert buffer.stats()["dropped_priorities"] == 8
    np.testing.assert_allclose(buffer.sample().probabilities, before)
    fresh = buffer.sample().keys
    other_writer = fresh + [7, 0, 0]
    buffer.update_priorities(other_writer, np.full(8, 100.0))
    assert buffer.stats()["dropped_priorities"] == 16


@pytest.mark.parametrize("wrong", [[-1.0] * 8, [np.nan] * 8, [np.inf] * 8, [1.0] * 7])
def test_priorities_that_are_none_are_refused(make: Any, wrong: list[float]) -> None:
    buffer, stream = make("prioritised", Transition(1), 8, 50), Stream(2)
    buffer.claim_rank(2)
    buffer.add(*stream.step())
    with pytest.raises(UsageError, match="finite priorities"):
        buffer.update_priorities(buffer.sample().keys, np.array(wrong))


@NOT_REVERB
def test_the_same_seed_draws_the_same_batches(make: Any) -> None:
    first, second, other = (make("uniform", Transition(1), 16, 1000, seed=seed) for seed in (1, 1, 2))
    stream = Stream(4)
    for buffer in (first, second, other):
        buffer.claim_rank(4)
    for _ in range(20):
        ids, step = stream.step()
        for buffer in (first, second, other):
            buffer.add(ids, step)
    draws = [np.concatenate([first_ids(buffer.sample()) for _ in range(5)]) for buffer in (first, second, other)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()


def test_a_batch_of_none_is_one_item_per_environment(make: Any) -> None:
    buffer = make("queue", Sequence(3), None, 1000)
    buffer.claim_rank(5)
    stream = Stream(5, end=0.0)
    for _ in range(2):
        buffer.add(*stream.step())
        assert buffer.sample() is None
    buffer.add(*stream.step())
    batch = buffer.sample()
    assert batch.data.action.shape == (5, 3)
    assert batch.data.observation["image"].shape == (5, 4, 2, 3)
    assert len(set(first_ids(batch))) == 5
    assert buffer.sample() is None


def test_what_older_versions_acted_in_is_forgotten_now_and_when_it_comes(make: Any) -> None:
    item = Sequence(3)
    buffer, twin, stream = make("queue", item, None, 1000, max_staleness=0), Twin(item), Stream(4, end=0.3)
    buffer.claim_rank(4)
    twin.claim_rank(4, 0)
    for t in range(12):  # an item of each environment every third step; a version of its own acts in each step
        ids, step = stream.step()
        buffer.add(ids, step)
        twin.add(ids, step)
        if t == 2:
            assert buffer.size == 4
            buffer.forget_before(8)  # the versions of the first item are 1 to 3, of the others 4 to 6, 7 to 9, 10 to 12
            assert buffer.sample() is None
        elif t != 11:
            assert buffer.sample() is None
    batch = buffer.sample()
    assert_batch_matches(batch, twin)
    np.testing.assert_array_equal(batch.params_version, [10, 10, 10, 10])
    assert buffer.sample() is None
    stats = buffer.stats()
    assert (stats["added"], stats["evicted"], stats["evicted_unsampled"], stats["items"]) == (16, 12, 12, 0)


def test_an_item_is_as_old_as_the_oldest_version_that_acted_in_it(make: Any) -> None:
    buffer, stream = make("queue", Sequence(4), 2, 1000), Stream(2, end=0.0)
    buffer.claim_rank(2)
    for version in (5, 6, 4, 7):  # one inferencer answered for another
        ids, step = stream.step()
        buffer.add(ids, step._replace(params_version=version))
    np.testing.assert_array_equal(buffer.sample().params_version, [4, 4])


def add_for(buffers: list[Any], stream: Stream, steps: int) -> None:
    """The same steps to all of them."""
    for _ in range(steps):
        arguments = stream.step()
        for buffer in buffers:
            buffer.add(*arguments)


def keyed(make: Any, *args: Any, **kwargs: Any) -> Any:
    """A buffer that gives items by their keys, to which a writer of 6 environments adds."""
    buffer = make(*args, **kwargs)
    assert buffer.fetches_by_key
    buffer.claim_rank(6)
    return buffer


@NOT_REVERB
@pytest.mark.parametrize("kind", ["uniform", "prioritised", "queue"])
@pytest.mark.parametrize("item", [Transition(1), Transition(3, 0.9), Sequence(4, 3)], ids=str)
def test_what_is_drawn_and_fetched_is_what_is_sampled(make: Any, kind: str, item: Any) -> None:
    samples, draws = (keyed(make, kind, item, 8, 300, seed=4, min_size=10) for _ in range(2))
    stream, batches = Stream(6), 0
    for _ in range(120):  # round and round
        add_for([samples, draws], stream, 1)
        batch, drawn = samples.sample(), draws.draw()
        assert (batch is None) == (drawn is None)
        if drawn is not None:
            fetched = draws.fetch(*drawn)
            for expected, given in zip(jax.tree.leaves(batch), jax.tree.leaves(fetched), strict=True):
                np.testing.assert_array_equal(given, expected)
                assert given.dtype == expected.dtype
            draws.finish(drawn.keys)
            draws.finish(drawn.keys)  # calls may be repeated
            batches += 1
    assert batches > 10
    stats = draws.stats()
    assert stats == samples.stats()
    taken = stats["sampled"] if kind == "queue" else 0
    assert stats["added"] == stats["items"] + stats["evicted"] + taken


@NOT_REVERB
@pytest.mark.parametrize("kind", ["uniform", "prioritised"])
def test_others_of_the_batch_stand_for_items_that_are_gone(make: Any, kind: str) -> None:
    buffer, twin, stream = keyed(make, kind, Transition(2), 64, 300), Twin(Transition(2)), Stream(6, end=0.0)
    twin.claim_rank(6, 0)
    for _ in range(50):
        arguments = stream.step()
        buffer.add(*arguments)
        twin.add(*arguments)
    drawn = buffer.draw()
    add_for([buffer], stream, 25)
    batch = buffer.fetch(*drawn)
    assert_batch_matches(batch, twin)
    kept = (batch.keys == drawn.keys).all(axis=1)
    assert 10 < kept.sum() < 54
    assert set(map(tuple, batch.keys.tolist())) == set(map(tuple, drawn.keys[kept].tolist()))
    by_key = dict(zip(map(tuple, drawn.keys.tolist()), drawn.probabilities.tolist()))
    assert batch.probabilities.tolist() == [by_key[tuple(key)] for key in batch.keys.tolist()]
    if kind == "prioritised":
        # A shared buffer gives items up a little before they are overwritten: they can be read, but not drawn.
        given_up = batch.keys[:, 2].min() + (0 if isinstance(buffer, ReplayBuffer) else 40)
        buffer.update_priorities(
            batch.keys[batch.keys[:, 2] >= given_up], np.full(sum(batch.keys[:, 2] >= given_up), 5)
        )
        assert buffer.stats()["dropped_priorities"] == 0
        buffer.update_priorities(drawn.keys[~kept], np.full(64 - kept.sum(), 5.0))
        assert buffer.stats()["dropped_priorities"] == 64 - kept.sum()
    add_for([buffer], stream, 100)
    assert buffer.fetch(*drawn) is None
    again = buffer.draw()
    buffer.claim_rank(6, 0)
    other_incarnation = again.keys + [0, 1, 0]
    assert buffer.fetch(other_incarnation, again.probabilities) is None


@NOT_REVERB
def test_priorities_that_are_set_after_a_fetch_decide_the_next_draw(make: Any) -> None:
    buffer = keyed(make, "prioritised", Transition(1), 32, 300, priority_exponent=1.0)
    add_for([buffer], Stream(6, end=0.0), 10)
    batch = buffer.fetch(*buffer.draw())
    buffer.update_priorities(batch.keys, np.where(batch.keys[:, 2] == batch.keys[0, 2], 1e6, 1e-6))
    following = buffer.draw()
    assert np.mean(following.keys[:, 2] == batch.keys[0, 2]) > 0.9
    assert following.probabilities[following.keys[:, 2] == batch.keys[0, 2]][0] > 0.99


@NOT_REVERB
def test_a_queue_keeps_what_was_drawn_until_it_is_finished(make: Any) -> None:
    buffer, twin, stream = keyed(make, "queue", Sequence(3), 4, 60), Twin(Sequence(3)), Stream(6)
    twin.claim_rank(6, 0)
    for _ in range(6):
        arguments = stream.step()
        buffer.add(*arguments)
        twin.add(*arguments)
    first, second = buffer.draw(), buffer.draw()
    assert set(map(tuple, first.keys.tolist())).isdisjoint(map(tuple, second.keys.tolist()))
    for drawn in (second, first, first):
        batch = buffer.fetch(*drawn)
        assert_batch_matches(batch, twin)
        np.testing.assert_array_equal(batch.keys, drawn.keys)
    assert buffer.stats()["sampled"] == 8
    buffer.finish(second.keys)
    buffer.finish(first.keys)
    assert buffer.draw() is not None
    assert buffer.draw() is None  # 12 items there were
    stats = buffer.stats()
    assert (stats["added"], stats["sampled"], stats["evicted"], stats["items"]) == (12, 12, 0, 0)


@NOT_REVERB
def test_drawing_is_paced_as_sampling_is(make: Any) -> None:
    buffer = keyed(make, "uniform", Transition(1), 8, 1000, min_size=12, samples_per_insert=2.0)
    stream, drawn = Stream(6, end=0.0), []
    for _ in range(10):
        add_for([buffer], stream, 1)
        drawn.append(0)
        while buffer.draw() is not None:
            drawn[-1] += 1
    assert drawn[:2] == [0, 1]
    assert sum(drawn) * 8 == pytest.approx(2 * (60 - 12), abs=8)


@NOT_REVERB
def test_who_waits_for_a_draw_gets_it_when_enough_was_added(make: Any) -> None:
    buffer = keyed(make, "uniform", Transition(1), 8, 1000, min_size=12)
    stream = Stream(6, end=0.0)
    assert buffer.draw(timeout=0.01) is None
    began = threading.Event()

    def add() -> None:
        began.wait(30.0)
        for _ in range(3):
            add_for([buffer], stream, 1)

    thread = threading.Thread(target=add)
    thread.start()
    begins = time.monotonic()
    began.set()
    drawn = wait_until(lambda: buffer.draw(timeout=100.0))  # a call may end early
    thread.join()
    assert time.monotonic() - begins < 60.0  # it was woken
    assert drawn.keys.shape == (8, 3)


@NOT_REVERB
@pytest.mark.parametrize(("keys", "count"), [((8, 2), 8), ((8, 3), 7), ((0, 3), 0), ((3,), 3)])
def test_keys_that_are_none_are_refused(make: Any, keys: tuple[int, ...], count: int) -> None:
    buffer = keyed(make, "uniform", Transition(1), 8, 1000)
    with pytest.raises(UsageError, match="keys .B, 3. and probabilities .B."):
        buffer.fetch(np.zeros(keys, np.int64), np.zeros(count))


def test_min_size_and_samples_per_insert_hold_sampling_back(make: Any) -> None:
    buffer = make("uniform", Transition(1), 8, 1000, min_size=10, samples_per_insert=2.0)
    buffer.claim_rank(2)
    stream, given = Stream(2, end=0.0), []
    for _ in range(12):
        buffer.add(*stream.step())
        given.append(0)
        while buffer.sample() is not None:
            given[-1] += 1
    assert given[:4] == [0, 0, 0, 0]
    assert given[4] == 1
    assert sum(given) * 8 == pytest.approx(2 * (24 - 10), abs=8)


def test_a_batch_is_not_changed_by_what_comes_later(make: Any) -> None:
    buffer = make("uniform", Transition(1), 8, 100)
    buffer.claim_rank(4)
    stream = Stream(4)
    for _ in range(30):
        buffer.add(*stream.step())
    batch = buffer.sample()
    copies = [np.array(batch.data.reward), np.array(batch.data.observation["image"])]
    for _ in range(60):
        buffer.add(*stream.step())
        buffer.sample()
    np.testing.assert_array_equal(batch.data.reward, copies[0])
    np.testing.assert_array_equal(batch.data.observation["image"], copies[1])


def test_ranks_are_given_in_order_and_taken_again_with_a_new_incarnation(make: Any) -> None:
    buffer = make("uniform", Transition(1), 8, 1000, writers=2)
    assert [buffer.claim_rank(4), buffer.claim_rank(4), buffer.claim_rank(4, rank=0)] == [(0, 0), (1, 0), (0, 1)]


def test_steps_of_an_unclaimed_rank_are_refused(make: Any) -> None:
    buffer = make("uniform", Transition(1), 8, 1000)
    buffer.claim_rank(4)
    ids, step = Stream(4, rank=3).step()
    with pytest.raises(UsageError, match="claim_rank"):
        buffer.add(ids, step)
    with pytest.raises(UsageError, match="Claimed: 0"):
        buffer.add(global_env_ids(0, np.array([2, 3, 4, 5])), step)


@pytest.mark.parametrize(
    ("leaf", "spoil"),
    [
        ("image", lambda step: step.timestep.observation.update(image=np.zeros((4, 2, 4), np.uint8))),
        ("image", lambda step: step.next_timestep.observation.update(image=np.zeros((4, 2, 3), np.float32))),
        ("id", lambda step: step.timestep.observation.pop("id")),
        ("log_prob", lambda step: step.agent_output.extras.clear()),
    ],
)
def test_a_leaf_that_is_not_what_the_spec_says_is_named(make: Any, leaf: str, spoil: Any) -> None:
    buffer = make("uniform", Transition(1), 8, 1000)
    buffer.claim_rank(4)
    ids, step = Stream(4).step()
    spoil(step)
    with pytest.raises(UsageError, match=leaf):
        buffer.add(ids, step)
    assert buffer.size == 0
