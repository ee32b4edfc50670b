"""Checks that compare a replay with a reference replay in plain Python."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from typing import Any

import numpy as np

from rlframe.errors import UsageError
from rlframe.testing.streams import ReferenceReplay, StepStream, assert_batch_matches, fake_agent, first_ids
from rlframe.types import Sequence, Transition, global_env_ids

Item = Transition | Sequence
Factory = Callable[..., Any]

KINDS = ("uniform", "queue", "prioritized")
ITEMS: tuple[Item, ...] = (
    Transition(1),
    Transition(3, 0.9),
    Transition(5, 0.97),
    Sequence(4),
    Sequence(5, period=2),
    Sequence(2, period=3),
    Sequence(1),
)
SCENARIOS = ("lockstep", "subsets", "broken fragments", "two writers", "reclaimed rank", "one slow environment")


def check_replay(factory: Factory, *, kinds: Several[str] = KINDS, items: Several[Item] = ITEMS) -> None:
    """Check all properties of a replay that Actors and Learners need. For a replay in memory, this takes seconds.

        check_replay(lambda agent, num_writers: MyReplay(agent))

    Args:
        factory: `factory(agent, num_writers)` returns an empty replay with the methods of `ReplayWriter` and
            `ReplayReader`, for `agent.replay_spec` and `agent.step_spec`. A single thread writes and reads.
        kinds: the kinds of `ReplaySpec` that the replay supports.
        items: the types of items that the replay supports.

    Raises:
        AssertionError: a check failed. The message names the check, the kind, the item and the scenario.
    """
    for kind in kinds:
        for item, scenario in itertools.product(items, SCENARIOS):
            with _error_context(f"{kind} replay of {item}, {scenario}"):
                check_items(factory, kind, item, scenario)
                check_eviction(factory, kind, item, scenario)
        for check in CHECKS[kind]:
            with _error_context(f"{kind} replay, {check.__name__}"):
                check(factory, kind)
        for item in PRIORITY_ITEMS:
            if kind == "prioritized" and any(isinstance(each, type(item)) for each in items):
                for priority_check in PRIORITY_CHECKS:
                    with _error_context(f"{kind} replay of {item}, {priority_check.__name__}"):
                        priority_check(factory, item)


@contextlib.contextmanager
def _error_context(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"In a {what}: {error}") from error


@contextlib.contextmanager
def new_replay(factory: Factory, *spec: Any, num_writers: int = 1, **options: Any) -> Iterator[Any]:
    """Yield a replay for an agent with `ReplaySpec(*spec, **options)`. At the end, call its `close` if it exists."""
    replay = factory(fake_agent(*spec, **options), num_writers)
    try:
        yield replay
    finally:
        getattr(replay, "close", lambda: None)()


def num_writers_of(scenario: str) -> int:
    """Return the number of writers in a scenario."""
    return 2 if scenario == "two writers" else 1


def add_experience(
    scenario: str,
    replay: Any,
    reference: ReferenceReplay,
    steps: int,
    num_envs: int = 6,
    seed: int = 0,
    end: float = 0.2,
) -> Iterator[int]:
    """Add the same experience to the replay and to the reference. Yield the step's index after every step."""
    rng = np.random.default_rng(seed)
    streams = [StepStream(num_envs, rank, seed, end) for rank in range(num_writers_of(scenario))]
    for stream in streams:
        claimed = replay.claim_rank(stream.num_envs, stream.rank)
        assert claimed == (stream.rank, 0), f"claim_rank returned {claimed} to the first writer of rank {stream.rank}"
        reference.claim_rank(stream.num_envs, stream.rank)
    for t in range(steps):
        stream = streams[int(rng.integers(len(streams)))]
        envs = None
        if scenario == "subsets":
            envs = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)]
        elif scenario == "broken fragments" and rng.random() < 0.3:
            stream.restart(rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)], unless_first=True)
        elif scenario == "reclaimed rank" and t % 11 == 10:
            stream.restart(np.arange(num_envs))
            claimed, incarnation = replay.claim_rank(num_envs, 0), (t + 1) // 11
            assert claimed == (0, incarnation), f"claim_rank returned {claimed} for incarnation {incarnation} of rank 0"
            reference.claim_rank(num_envs, 0)
        elif scenario == "one slow environment" and t % 9:
            envs = np.arange(1, num_envs)
        ids, step = stream.step(envs)
        replay.add(ids, step)
        reference.add(ids, step)
        yield t


def _add_steps(replay: Any, stream: StepStream, count: int) -> None:
    """Add `count` steps of all environments of a stream."""
    for _ in range(count):
        replay.add(*stream.step())


def check_items(factory: Factory, kind: str, item: Item, scenario: str) -> None:
    """Check that a replay returns only added items: a queue returns each item once, other kinds draw uniformly."""
    reference, seen, batch_size = ReferenceReplay(item), [], 4 if kind == "queue" else 8
    with new_replay(factory, kind, item, batch_size, 10_000, num_writers=num_writers_of(scenario)) as replay:
        for _ in add_experience(scenario, replay, reference, 40):
            if kind == "queue":
                while (batch := replay.sample()) is not None:
                    assert_batch_matches(batch, reference)
                    seen += first_ids(batch).tolist()
                    assert len(seen) <= len(reference.items), "the queue returned more items than were added"
                assert replay.stats()["items"] == len(reference.items) - len(seen) < 4, (
                    "the queue lost an item, or kept a sampled item"
                )
                continue
            assert replay.stats()["items"] == len(reference.items), (
                "stats()['items'] is not the number of complete items"
            )
            batch = replay.sample()
            assert (batch is None) == (not reference.items), (
                "sample() must return a batch if the replay has an item, and None if it has no item"
            )
            if batch is not None:
                assert_batch_matches(batch, reference)
                np.testing.assert_allclose(batch.probabilities, 1 / len(reference.items), rtol=1e-6)
    order = {first: i for i, first in enumerate(reference.items)}
    assert len(set(seen)) == len(seen) and set(seen) <= set(order), "the queue returned an item twice"
    # One call of `add` may complete several items, in any order.
    out_of_order = max((abs(order[first] - i) for i, first in enumerate(seen)), default=0)
    assert out_of_order <= 6 * 5, f"an item of the queue is {out_of_order} places from its correct place"


def check_eviction(factory: Factory, kind: str, item: Item, scenario: str) -> None:
    """Check that a full replay evicts the oldest items, counts the evicted items, and draws only complete items."""
    reference, sampled = ReferenceReplay(item), 0
    with new_replay(factory, kind, item, 4, 96, num_writers=num_writers_of(scenario)) as replay:
        for t in add_experience(scenario, replay, reference, 140):
            batch = replay.sample() if t % 30 == 29 else None
            if batch is not None:
                assert_batch_matches(batch, reference)
                sampled += 4
        stats = replay.stats()
        # With slow writers, an item's first step can be evicted before its last step is added. Such items are lost.
        slow = scenario in ("one slow environment", "two writers")
        assert stats["added"] <= len(reference.items) if slow else stats["added"] == len(reference.items), (
            f"{stats}: 'added' is not the number of items that the added steps complete"
        )
        taken = sampled if kind == "queue" else 0
        assert stats["added"] == stats["items"] + stats["evicted"] + taken, (
            f"{stats}: 'added' must be 'items' + 'evicted', plus 'sampled' for a queue"
        )
        assert stats["evicted"] > 0, f"{stats}: the full replay evicted nothing"
        if kind == "queue":
            return
        drawn: set[int] = set()
        for _ in range(2000):
            drawn.update(first_ids(replay.sample()).tolist())
            if len(drawn) == stats["items"]:
                break
        assert len(drawn) == stats["items"], f"only {len(drawn)} of {stats['items']} items were drawn"


def check_batch_size_none(factory: Factory, kind: str) -> None:
    """Check that a batch has one item of each environment if `batch_size` is None."""
    with new_replay(factory, kind, Sequence(3), None, 1000) as replay:
        replay.claim_rank(5)
        stream = StepStream(5, end=0.0)
        for _ in range(2):
            replay.add(*stream.step())
            assert replay.sample() is None, "sample() must return None before each environment has an item"
        replay.add(*stream.step())
        batch = replay.sample()
        assert batch is not None and batch.data.action.shape == (5, 3), (
            "the shape of a batch must be [environments, length, ...]"
        )
        assert batch.data.observation["image"].shape == (5, 4, 2, 3), (
            "the shape of observations must be [environments, length + 1, ...]"
        )
        assert len(set(first_ids(batch))) == 5, "the batch must have one item of each environment"
        assert replay.sample() is None, "the queue returned an item twice"


def check_oldest_version(factory: Factory, kind: str) -> None:
    """Check that an item's `params_version` is the oldest version among its steps."""
    with new_replay(factory, kind, Sequence(4), 2, 1000) as replay:
        stream = StepStream(2, end=0.0)
        replay.claim_rank(2)
        for version in (5, 6, 4, 7):  # versions can decrease, because inferencers can have different versions
            ids, step = stream.step()
            replay.add(ids, step._replace(params_version=version))
        np.testing.assert_array_equal(replay.sample().params_version, [4, 4])


def check_uniform_sampling(factory: Factory, kind: str) -> None:
    """Check that a uniform replay draws all items with equal probability."""
    reference = ReferenceReplay(Transition(3))
    with new_replay(factory, kind, Transition(3), 100, 200) as replay:
        for _ in add_experience("subsets", replay, reference, 200):
            pass
        size = replay.stats()["items"]
        draws = np.concatenate([first_ids(replay.sample()) for _ in range(400)])
    ids, counts = np.unique(draws, return_counts=True)
    expected = 40_000 / size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert len(ids) == size, f"only {len(ids)} of {size} items were drawn"
    assert abs(chi_square - size) < 5 * np.sqrt(2 * size), f"chi square {chi_square:.0f} of {size} items"


def check_rate_limiter(factory: Factory, kind: str) -> None:
    """Check that `min_size` and `samples_per_insert` limit sampling, as described in `RateLimiter`."""
    with new_replay(factory, kind, Transition(1), 8, 1000, min_size=10, samples_per_insert=2.0) as replay:
        replay.claim_rank(2)
        stream, given = StepStream(2, end=0.0), []
        for _ in range(12):
            replay.add(*stream.step())
            given.append(0)
            while replay.sample() is not None:
                given[-1] += 1
    assert given[:5] == [0, 0, 0, 0, 1], (
        "the first batch must be available when 10 items were added. "
        f"The numbers of batches after 2, 4, 6, ... items are {given}"
    )
    assert abs(sum(given) * 8 - 2 * (24 - 10)) <= 8, (
        f"with 24 inserts, samples_per_insert=2 and min_size=10, about 28 items must be sampled, not {sum(given) * 8}"
    )


def check_batch_is_not_overwritten(factory: Factory, kind: str) -> None:
    """Check that the data of a batch does not change when further steps are added."""
    with new_replay(factory, kind, Transition(1), 8, 100) as replay:
        replay.claim_rank(4)
        stream = StepStream(4)
        _add_steps(replay, stream, 30)
        batch = replay.sample()
        reward, image = np.array(batch.data.reward), np.array(batch.data.observation["image"])
        for _ in range(60):
            replay.add(*stream.step())
            replay.sample()
        np.testing.assert_array_equal(batch.data.reward, reward)
        np.testing.assert_array_equal(batch.data.observation["image"], image)


def check_ranks(factory: Factory, kind: str) -> None:
    """Check that ranks are assigned in order, and that a second claim of a rank gets a new incarnation.

    Also check that steps of ranks that no writer has claimed are refused.
    """
    with new_replay(factory, kind, Transition(1), 8, 1000, num_writers=2) as replay:
        claimed = [replay.claim_rank(4), replay.claim_rank(4), replay.claim_rank(4, rank=0)]
        assert claimed == [(0, 0), (1, 0), (0, 1)], f"claim_rank returned {claimed}"
        ids, step = StepStream(4, rank=3).step()
        for wrong in (ids, global_env_ids(0, np.array([2, 3, 4, 5]))):
            try:
                replay.add(wrong, step)
            except UsageError:
                continue
            raise AssertionError(f"add() accepted steps of the environments {wrong}, whose rank no writer has claimed")


def check_dataset(factory: Factory, kind: str) -> None:
    """Check that the iterator from `make_dataset` returns valid batches."""
    reference = ReferenceReplay(Transition(1))
    with new_replay(factory, kind, Transition(1), 4, 1000) as replay:
        for _ in add_experience("lockstep", replay, reference, 20):
            pass
        dataset = replay.make_dataset()
        for _ in range(5):
            assert_batch_matches(next(dataset), reference)
        getattr(dataset, "close", lambda: None)()


def check_priorities(factory: Factory, item: Item) -> None:
    """Check that items are drawn in proportion to priority^exponent, and that `probabilities` are correct."""
    with new_replay(factory, "prioritized", item, 50, 400, priority_exponent=0.5) as replay:
        for _ in add_experience("subsets", replay, ReferenceReplay(item), 100):
            pass
        priorities: dict[int, float] = {}
        for _ in range(400):  # the priority of an item depends on the id of its first observation
            batch = replay.sample()
            ids = first_ids(batch)
            replay.update_priorities(batch.keys, (ids % 7 + 0.5) ** 2)
            priorities.update(zip(ids.tolist(), ((ids % 7) + 0.5).tolist()))
        assert len(priorities) == replay.stats()["items"], "some items were never drawn"
        total, counts = sum(priorities.values()), dict.fromkeys(priorities, 0)
        for _ in range(400):
            batch = replay.sample()
            expected = [priorities[first] / total for first in first_ids(batch).tolist()]
            np.testing.assert_allclose(batch.probabilities, expected, rtol=1e-5)
            for first in first_ids(batch).tolist():
                counts[first] += 1
    chances = {first: 20_000 * priority / total for first, priority in priorities.items()}
    chi_square = sum((counts[first] - chances[first]) ** 2 / chances[first] for first in priorities)
    assert chi_square < len(priorities) + 5 * np.sqrt(2 * len(priorities)), f"chi square {chi_square:.0f}"


def check_new_priority(factory: Factory, item: Item) -> None:
    """Check that a new item gets the highest priority so far."""
    steps, more = (item.n_step, 1) if isinstance(item, Transition) else (item.length, item.period)
    with new_replay(factory, "prioritized", item, 64, 400, priority_exponent=1.0) as replay:
        replay.claim_rank(1)
        stream = StepStream(1, end=0.0)
        _add_steps(replay, stream, steps)
        replay.update_priorities(replay.sample().keys[:1], np.array([3.0]))
        _add_steps(replay, stream, more)
        np.testing.assert_allclose(replay.sample().probabilities, 0.5)
        batch = replay.sample()
        older = batch.keys[batch.keys[:, 2].argmin()]
        replay.update_priorities(older[None], np.array([1.0]))
        chances = {float(chance) for chance in np.round(replay.sample().probabilities, 6)}
        assert chances == {0.25, 0.75}, f"the priorities 1 and 3 result in the probabilities {chances}"


def check_priorities_of_evicted_items(factory: Factory, item: Item) -> None:
    """Check that priority updates of evicted items are only counted, and that invalid priorities are refused."""
    stream = StepStream(2)
    with new_replay(factory, "prioritized", item, 8, 50) as replay:
        replay.claim_rank(2)
        _add_steps(replay, stream, 10)
        old = replay.sample().keys
        _add_steps(replay, stream, 100)
        before = replay.sample().probabilities
        replay.update_priorities(old, np.full(8, 100.0))
        assert replay.stats()["dropped_priorities"] == 8, "updates of evicted items must be counted"
        np.testing.assert_allclose(replay.sample().probabilities, before)
        replay.update_priorities(replay.sample().keys + [7, 0, 0], np.full(8, 100.0))
        assert replay.stats()["dropped_priorities"] == 16, "updates of another writer's items must be counted"
        for wrong in ([-1.0] * 8, [np.nan] * 8, [np.inf] * 8, [1.0] * 7):
            try:
                replay.update_priorities(replay.sample().keys, np.array(wrong))
            except UsageError:
                continue
            raise AssertionError(f"update_priorities accepted {wrong}")


_FOR_ALL = (check_ranks, check_dataset)
_FOR_DRAWN = (*_FOR_ALL, check_rate_limiter, check_batch_is_not_overwritten)
CHECKS: dict[str, tuple[Callable[[Factory, str], None], ...]] = {
    "uniform": (*_FOR_DRAWN, check_uniform_sampling),
    "queue": (*_FOR_ALL, check_batch_size_none, check_oldest_version),
    "prioritized": _FOR_DRAWN,
}
PRIORITY_CHECKS: tuple[Callable[[Factory, Item], None], ...] = (
    check_priorities,
    check_new_priority,
    check_priorities_of_evicted_items,
)
PRIORITY_ITEMS: tuple[Item, ...] = (Transition(2), Sequence(4, period=2))
