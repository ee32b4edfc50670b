"""Tests that all replay buffers of this package pass `rlframe.testing.check_replay` and some further checks."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

from rlframe import testing
from rlframe.errors import UsageError
from rlframe.replay import ReplayBuffer
from rlframe.testing.replay import (
    CHECKS,
    ITEMS,
    KINDS,
    PRIORITY_CHECKS,
    PRIORITY_ITEMS,
    SCENARIOS,
    add_experience,
    check_eviction,
    check_items,
    num_writers_of,
)
from rlframe.testing.streams import ReferenceReplay, StepStream, assert_batch_matches, fake_agent, first_ids
from rlframe.types import Sequence, Transition
from tests.replay.factories import FACTORIES, local, reverb, shared_memory
from tests.waiting import wait_until

# The in-process buffer is tested in all cases, because writers to Reverb also use its code. Reverb is tested in every
# third case, because each case needs a server. `make test` runs every sixth case of the in-process buffer (these have
# all items and all scenarios), every twelfth case of the other buffers, and no test of Reverb in this file.
EACH_SCENARIO = pytest.mark.parametrize(
    ("make", "item", "scenario"),
    [
        pytest.param(
            *(factory, item, scenario),
            id=f"{factory.__name__}-{item}-{scenario}",
            marks=[pytest.mark.system] if factory is reverb or (i + j) % (6 if factory is local else 12) else [],
        )
        for factory in FACTORIES
        for i, item in enumerate(ITEMS)
        for j, scenario in enumerate(SCENARIOS)
        if factory is not reverb or (i + j) % 3 == 0
    ],
    indirect=["make"],
)
# A Reverb server has no seed, and cannot return items by their keys.
NOT_REVERB = pytest.mark.parametrize("make", [local, shared_memory], indirect=True, ids=["local", "shared_memory"])


REVERB = pytest.param(reverb, marks=pytest.mark.system)


@pytest.fixture(params=[REVERB if one is reverb else one for one in FACTORIES], ids=[one.__name__ for one in FACTORIES])
def make(request: pytest.FixtureRequest) -> Any:
    new_replay = []

    def build(*args: Any, seed: int = 0, writers: int = 1, **kwargs: Any) -> Any:
        new_replay.append(request.param(fake_agent(*args, **kwargs), writers, seed))
        return new_replay[-1]

    build.is_reverb, build.factory = request.param is reverb, request.param
    yield build
    for buffer in new_replay:
        buffer.close()


@pytest.mark.parametrize("kind", KINDS)
@EACH_SCENARIO
def test_every_sampled_item_was_added(make: Any, item: Any, scenario: str, kind: str) -> None:
    check_items(make.factory, kind, item, scenario)


@pytest.mark.parametrize("kind", KINDS)
@EACH_SCENARIO
def test_full_buffer_evicts_and_counts_the_oldest_items(make: Any, item: Any, scenario: str, kind: str) -> None:
    check_eviction(make.factory, kind, item, scenario)


@pytest.mark.parametrize(("kind", "check"), [(kind, check) for kind in KINDS for check in CHECKS[kind]])
def test_buffer_passes_the_checks_for_each_kind_of_items(make: Any, kind: str, check: Any) -> None:
    check(make.factory, kind)


@pytest.mark.parametrize(
    "item", [pytest.param(item, marks=[pytest.mark.system] * (i > 0)) for i, item in enumerate(PRIORITY_ITEMS)], ids=str
)
@pytest.mark.parametrize("check", PRIORITY_CHECKS)
def test_buffer_passes_the_checks_for_priorities(make: Any, item: Any, check: Any) -> None:
    check(make.factory, item)


class WrongRewards(ReplayBuffer):
    """A wrong replay: it changes the rewards."""

    def sample(self) -> Any:
        batch = super().sample()
        return batch and batch._replace(data=batch.data._replace(reward=batch.data.reward + 1))


class RepeatedItems(ReplayBuffer):
    """A wrong replay: it returns some items of a queue twice."""

    @functools.cached_property
    def _given(self) -> list[Any]:
        return []

    def sample(self) -> Any:
        batch = super().sample()
        self._given.append(batch)
        return batch if batch is not None or len(self._given) < 20 else self._given[0]


@pytest.mark.parametrize(("wrong", "kind"), [(WrongRewards, "uniform"), (RepeatedItems, "queue")])
def test_check_replay_names_the_failed_check(wrong: Any, kind: str) -> None:
    with pytest.raises(AssertionError, match=f"In a {kind} replay of Transition.*lockstep"):
        testing.check_replay(lambda agent, num_writers: wrong(agent), kinds=[kind], items=[Transition(1)])


def test_check_replay_runs_all_checks() -> None:
    testing.check_replay(local, kinds=["uniform"], items=[Transition(3)])


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
@EACH_SCENARIO
def test_full_buffer_keeps_the_newest_steps(make: Any, item: Any, scenario: str, kind: str) -> None:
    capacity, num_envs = 96, 6
    buffer, reference = make(kind, item, 4, capacity, writers=num_writers_of(scenario)), ReferenceReplay(item)
    for _ in add_experience(scenario, buffer, reference, 140):
        pass
    items = buffer.stats()["items"]
    drawn: set[int] = set()
    for _ in range(2000):  # about 200 batches are enough, but servers have random seeds
        drawn.update(first_ids(buffer.sample()).tolist())
        if len(drawn) == items:
            break
    # Reverb's capacity is a number of items. Items are evicted in the order of completion. Within one call of `add`,
    # the order is not defined.
    if make.is_reverb:
        at_once = num_envs * getattr(item, "n_step", 1)
        must_stay = set(list(reference.items)[len(reference.items) - max(0, items - at_once) :])
    else:  # some buffers divide their capacity among the writers
        newest = {first for seen in reference.seen.values() for first in seen[-capacity // num_writers_of(scenario) :]}
        must_stay = {first for first in newest & reference.items.keys() if first >= StepStream.next_id - capacity}
    assert must_stay <= drawn


@pytest.mark.parametrize("item", [pytest.param(Transition(1), marks=pytest.mark.system), Transition(3)], ids=str)
def test_environment_begins_a_new_fragment_after_its_steps_were_evicted(make: Any, item: Any) -> None:
    buffer, reference, stream = make("uniform", item, 8, 40), ReferenceReplay(item), StepStream(4, end=0.1)
    buffer.claim_rank(4)
    reference.claim_rank(4, 0)
    for t in range(120):
        ids, step = stream.step(np.arange(0 if t % 30 < 5 else 1, 4))
        buffer.add(ids, step)
        reference.add(ids, step)
        if (batch := buffer.sample()) is not None:
            assert_batch_matches(batch, reference)


@NOT_REVERB
def test_buffers_with_equal_seeds_draw_equal_batches(make: Any) -> None:
    first, second, other = (make("uniform", Transition(1), 16, 1000, seed=seed) for seed in (1, 1, 2))
    stream = StepStream(4)
    for buffer in (first, second, other):
        buffer.claim_rank(4)
    for _ in range(20):
        ids, step = stream.step()
        for buffer in (first, second, other):
            buffer.add(ids, step)
    draws = [np.concatenate([first_ids(buffer.sample()) for _ in range(5)]) for buffer in (first, second, other)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()


def test_forget_before_drops_present_and_later_items(make: Any) -> None:
    item = Sequence(3)
    buffer, reference, stream = (
        make("queue", item, None, 1000, max_staleness=0),
        ReferenceReplay(item),
        StepStream(4, end=0.3),
    )
    buffer.claim_rank(4)
    reference.claim_rank(4, 0)
    for t in range(12):  # every third step completes an item in each environment; step t has the version t + 1
        ids, step = stream.step()
        buffer.add(ids, step)
        reference.add(ids, step)
        if t == 2:
            assert buffer.size == 4
            # The items have the versions 1 to 3, 4 to 6, 7 to 9, and 10 to 12. Only the last has none below 8.
            buffer.forget_before(8)
            assert buffer.sample() is None
        elif t != 11:
            assert buffer.sample() is None
    batch = buffer.sample()
    assert_batch_matches(batch, reference)
    np.testing.assert_array_equal(batch.params_version, [10, 10, 10, 10])
    assert buffer.sample() is None
    stats = buffer.stats()
    assert (stats["added"], stats["evicted"], stats["evicted_unsampled"], stats["items"]) == (16, 12, 12, 0)


def add_steps(buffers: list[Any], stream: StepStream, steps: int) -> None:
    """Add the same steps to all buffers."""
    for _ in range(steps):
        arguments = stream.step()
        for buffer in buffers:
            buffer.add(*arguments)


def keyed(make: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a buffer that can fetch items by their keys. It has a writer with 6 environments."""
    buffer = make(*args, **kwargs)
    assert buffer.fetches_by_key
    buffer.claim_rank(6)
    return buffer


@NOT_REVERB
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "queue"])
@pytest.mark.parametrize("item", [Transition(1), Transition(3, 0.9), Sequence(4, 3)], ids=str)
def test_draw_and_fetch_return_the_same_items_as_sample(make: Any, kind: str, item: Any) -> None:
    samples, draws = (keyed(make, kind, item, 8, 300, seed=4, min_size=10) for _ in range(2))
    stream, batches = StepStream(6), 0
    for _ in range(120):  # enough steps to fill the ring several times
        add_steps([samples, draws], stream, 1)
        batch, drawn = samples.sample(), draws.draw()
        assert (batch is None) == (drawn is None)
        if drawn is not None:
            fetched = draws.fetch(*drawn)
            for expected, given in zip(jax.tree.leaves(batch), jax.tree.leaves(fetched), strict=True):
                np.testing.assert_array_equal(given, expected)
                assert given.dtype == expected.dtype
            draws.release(drawn.keys)
            draws.release(drawn.keys)  # a second call must do nothing
            batches += 1
    assert batches > 10
    stats = draws.stats()
    assert stats == samples.stats()
    taken = stats["sampled"] if kind == "queue" else 0
    assert stats["added"] == stats["items"] + stats["evicted"] + taken


@NOT_REVERB
@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_fetch_replaces_evicted_items_by_other_items_of_the_batch(make: Any, kind: str) -> None:
    buffer, reference, stream = (
        keyed(make, kind, Transition(2), 64, 300),
        ReferenceReplay(Transition(2)),
        StepStream(6, end=0.0),
    )
    reference.claim_rank(6, 0)
    for _ in range(50):
        arguments = stream.step()
        buffer.add(*arguments)
        reference.add(*arguments)
    drawn = buffer.draw()
    add_steps([buffer], stream, 25)
    batch = buffer.fetch(*drawn)
    assert_batch_matches(batch, reference)
    kept = (batch.keys == drawn.keys).all(axis=1)
    assert 10 < kept.sum() < 54
    assert set(map(tuple, batch.keys.tolist())) == set(map(tuple, drawn.keys[kept].tolist()))
    by_key = dict(zip(map(tuple, drawn.keys.tolist()), drawn.probabilities.tolist()))
    assert batch.probabilities.tolist() == [by_key[tuple(key)] for key in batch.keys.tolist()]
    if kind == "prioritized":
        # A shared-memory buffer evicts items shortly before it overwrites them. Until then, they can still be read.
        given_up = batch.keys[:, 2].min() + (0 if isinstance(buffer, ReplayBuffer) else 40)
        buffer.update_priorities(
            batch.keys[batch.keys[:, 2] >= given_up], np.full(sum(batch.keys[:, 2] >= given_up), 5)
        )
        assert buffer.stats()["dropped_priorities"] == 0
        buffer.update_priorities(drawn.keys[~kept], np.full(64 - kept.sum(), 5.0))
        assert buffer.stats()["dropped_priorities"] == 64 - kept.sum()
    add_steps([buffer], stream, 100)
    assert buffer.fetch(*drawn) is None
    again = buffer.draw()
    buffer.claim_rank(6, 0)
    other_incarnation = again.keys + [0, 1, 0]
    assert buffer.fetch(other_incarnation, again.probabilities) is None


@NOT_REVERB
def test_priorities_set_after_a_fetch_determine_the_next_draw(make: Any) -> None:
    buffer = keyed(make, "prioritized", Transition(1), 32, 300, priority_exponent=1.0)
    add_steps([buffer], StepStream(6, end=0.0), 10)
    batch = buffer.fetch(*buffer.draw())
    buffer.update_priorities(batch.keys, np.where(batch.keys[:, 2] == batch.keys[0, 2], 1e6, 1e-6))
    following = buffer.draw()
    assert np.mean(following.keys[:, 2] == batch.keys[0, 2]) > 0.9
    assert following.probabilities[following.keys[:, 2] == batch.keys[0, 2]][0] > 0.99


@NOT_REVERB
def test_queue_keeps_drawn_items_until_release(make: Any) -> None:
    buffer, reference, stream = keyed(make, "queue", Sequence(3), 4, 60), ReferenceReplay(Sequence(3)), StepStream(6)
    reference.claim_rank(6, 0)
    for _ in range(6):
        arguments = stream.step()
        buffer.add(*arguments)
        reference.add(*arguments)
    first, second = buffer.draw(), buffer.draw()
    assert set(map(tuple, first.keys.tolist())).isdisjoint(map(tuple, second.keys.tolist()))
    for drawn in (second, first, first):
        batch = buffer.fetch(*drawn)
        assert_batch_matches(batch, reference)
        np.testing.assert_array_equal(batch.keys, drawn.keys)
    assert buffer.stats()["sampled"] == 8
    buffer.release(second.keys)
    buffer.release(first.keys)
    assert buffer.draw() is not None
    assert buffer.draw() is None  # all 12 items were drawn
    stats = buffer.stats()
    assert (stats["added"], stats["sampled"], stats["evicted"], stats["items"]) == (12, 12, 0, 0)


@NOT_REVERB
def test_samples_per_insert_limits_the_number_of_draws(make: Any) -> None:
    buffer = keyed(make, "uniform", Transition(1), 8, 1000, min_size=12, samples_per_insert=2.0)
    stream, drawn = StepStream(6, end=0.0), []
    for _ in range(10):
        add_steps([buffer], stream, 1)
        drawn.append(0)
        while buffer.draw() is not None:
            drawn[-1] += 1
    assert drawn[:2] == [0, 1]
    assert sum(drawn) * 8 == pytest.approx(2 * (60 - 12), abs=8)


@NOT_REVERB
def test_waiting_draw_returns_once_enough_items_were_added(make: Any) -> None:
    buffer = keyed(make, "uniform", Transition(1), 8, 1000, min_size=12)
    stream = StepStream(6, end=0.0)
    assert buffer.draw(timeout=0.01) is None
    began = threading.Event()

    def add() -> None:
        began.wait(30.0)
        for _ in range(3):
            add_steps([buffer], stream, 1)

    thread = threading.Thread(target=add)
    thread.start()
    begins = time.monotonic()
    began.set()
    drawn = wait_until(lambda: buffer.draw(timeout=100.0))  # `draw` may return before the timeout
    thread.join()
    assert time.monotonic() - begins < 60.0  # the new items ended the wait
    assert drawn.keys.shape == (8, 3)


@NOT_REVERB
@pytest.mark.parametrize(("keys", "count"), [((8, 2), 8), ((8, 3), 7), ((0, 3), 0), ((3,), 3)])
def test_keys_with_a_wrong_shape_are_refused(make: Any, keys: tuple[int, ...], count: int) -> None:
    buffer = keyed(make, "uniform", Transition(1), 8, 1000)
    with pytest.raises(UsageError, match="keys .B, 3. and probabilities .B."):
        buffer.fetch(np.zeros(keys, np.int64), np.zeros(count))


def test_steps_of_an_unclaimed_rank_are_refused(make: Any) -> None:
    buffer = make("uniform", Transition(1), 8, 1000)
    buffer.claim_rank(4)
    ids, step = StepStream(4, rank=3).step()
    with pytest.raises(UsageError, match=r"Claimed: 0 \(4 environments\)\. Call claim_rank"):
        buffer.add(ids, step)


@pytest.mark.parametrize(
    ("leaf", "spoil"),
    [
        ("image", lambda step: step.timestep.observation.update(image=np.zeros((4, 2, 4), np.uint8))),
        ("image", lambda step: step.next_timestep.observation.update(image=np.zeros((4, 2, 3), np.float32))),
        ("id", lambda step: step.timestep.observation.pop("id")),
        ("log_prob", lambda step: step.agent_output.extras.clear()),
    ],
)
def test_error_names_a_leaf_that_does_not_match_the_spec(make: Any, leaf: str, spoil: Any) -> None:
    buffer = make("uniform", Transition(1), 8, 1000)
    buffer.claim_rank(4)
    ids, step = StepStream(4).step()
    spoil(step)
    with pytest.raises(UsageError, match=leaf):
        buffer.add(ids, step)
    assert buffer.size == 0


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_of_add_are_refused(make: Any, kind: str) -> None:
    stream = StepStream(2)
    buffer = make(kind, Transition(1), 4, 64)
    buffer.claim_rank(2)
    env_ids, step = stream.step()
    for wrong in ((env_ids, step.timestep), (env_ids, [step.timestep, step.agent_output, ()]), (list(env_ids), step)):
        with pytest.raises(UsageError, match=r"add\(\) expects \(env_ids, step\).*Step\(timestep, agent_output.*Got"):
            buffer.add(*wrong)
