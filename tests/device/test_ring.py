"""Replays in device memory return the same items as a reference replay from the same steps."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from rlframe.device.replay import StepRecord
from rlframe.device.ring import DeviceSumTree, StepRing
from rlframe.errors import UsageError
from rlframe.replay.rate_limiter import ItemCounts, RateLimiter
from rlframe.testing.streams import ReferenceReplay, StepStream, batch_items, first_ids
from rlframe.types import ReplaySpec, Sequence, Transition

NUM_ENVS = 4
RNG = jax.random.PRNGKey(0)
ITEMS = [Transition(1), Transition(3, 0.9), Sequence(4), Sequence(5, 2)]
FAST = {("uniform", ITEMS[1]), ("prioritized", ITEMS[3])}
KINDS_AND_ITEMS = [
    pytest.param(kind, item, id=f"{item}-{kind}", marks=[] if (kind, item) in FAST else pytest.mark.system)
    for item in ITEMS
    for kind in ("uniform", "prioritized")
]


def to_record(step):
    output = step.agent_output
    record = StepRecord(step.timestep, output.action, output.extras, step.agent_state, step.next_timestep)
    return jax.tree.map(np.copy, record)


def compare(data, reference, rows=slice(None)):
    """Check that each of these rows of a batch is an item of the reference. Return the ids of the items."""
    data = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], data)
    batch = types.SimpleNamespace(data=data, keys=range(len(data.reward)))
    firsts = first_ids(batch).tolist()
    items, contents = batch_items(batch), [reference.items[first][0] for first in firsts]
    assert all(item.keys() == content.keys() for item, content in zip(items, contents, strict=True))
    for name in items[0]:
        item, content = (np.stack([each[name] for each in some]) for some in (items, contents))
        np.testing.assert_allclose(item, content, rtol=1e-5, atol=1e-6, err_msg=name)
    return firsts


def places_of_items(ring, state, is_item):
    """Return all places of a ring (times, environments), and a mask of the places where an item begins."""
    times = np.arange(int(state.head) + 1 - ring.rows, int(state.head))
    period = getattr(ring._spec.item, "period", 1)
    length = ring._length if isinstance(ring._spec.item, Sequence) else 0
    mask = (times >= 0) & (times % period == 0) & (times + length <= state.head)
    times, envs = (grid.ravel() for grid in np.meshgrid(times, np.arange(NUM_ENVS), indexing="ij"))
    return times, envs, np.repeat(mask, NUM_ENVS) & np.asarray(is_item(state, times, envs))


@pytest.mark.parametrize(("kind", "item"), KINDS_AND_ITEMS)
def test_ring_contains_the_items_of_the_reference_replay(kind, item):
    spec = ReplaySpec(kind, item, batch_size=16, capacity=60, min_size=10)
    ring, stream, reference = StepRing(spec, NUM_ENVS), StepStream(NUM_ENVS), ReferenceReplay(item)
    reference.claim_rank(NUM_ENVS, 0)
    add, draw = jax.jit(ring.add), jax.jit(ring.draw)
    read, is_item = jax.jit(ring._items), jax.jit(ring._is_item)
    state = None
    for _ in range(60):
        ids, step = stream.step()
        record = to_record(step)
        state = ring.init(record) if state is None else state
        state = add(state, jax.tree.map(lambda leaf: leaf[None], record))
        reference.add(ids, step)
        times, envs, mask = places_of_items(ring, state, is_item)
        assert int(state.size) == mask.sum()
        if not mask.any():
            continue
        found = compare(read(state.steps, times, envs), reference, mask)
        # The ring has the newest items, and no others.
        newest = sorted(reference.items)[-len(found) :]
        assert sorted(found) == newest
        if state.head < ring.rows:
            assert len(found) == len(reference.items)
        state, batch, _ = draw(RNG, state)
        drawn = compare(batch.data, reference)
        assert len(drawn) == spec.batch_size
        assert set(drawn) <= set(found)
        np.testing.assert_allclose(batch.probabilities, 1 / len(found), rtol=1e-5)


@pytest.mark.parametrize("ratio", [None, 1 / 3, *(pytest.param(one, marks=pytest.mark.system) for one in (0.25, 4.0))])
def test_ring_allows_as_many_updates_as_the_rate_limiter(ratio):
    spec = ReplaySpec("uniform", Transition(2), batch_size=8, capacity=1000, min_size=20, samples_per_insert=ratio)
    ring, stream, limiter = StepRing(spec, NUM_ENVS), StepStream(NUM_ENVS), RateLimiter(spec)
    reference = ReferenceReplay(spec.item)
    reference.claim_rank(NUM_ENVS, 0)
    add, is_ready, draw = jax.jit(ring.add), jax.jit(ring.is_ready), jax.jit(ring.draw)
    state, sampled = None, 0
    for _ in range(100):
        ids, step = stream.step()
        record = to_record(step)
        state = ring.init(record) if state is None else state
        state, updates = add(state, jax.tree.map(lambda leaf: leaf[None], record)), 0
        while is_ready(state):
            state, updates = draw(RNG, state)[0], updates + 1
            if ring.updates_per_round == "at most one":
                break
        reference.add(ids, step)
        inserted, expected = len(reference.items), 0
        while limiter.may_sample(8, ItemCounts(inserted, inserted, sampled)):
            sampled, expected = sampled + 8, expected + 1
            if ratio is None:
                break
        assert updates == expected


def test_timesteps_are_numbered_in_cycles_so_that_the_numbers_never_overflow():
    ring = StepRing(ReplaySpec("uniform", Sequence(4, 3), batch_size=2, capacity=20, min_size=1), 2)
    assert (ring.rows, ring._cycle) == (11, 33)
    times, time = [], 0
    for _ in range(100):
        times, time = [*times, time], int(ring._next_time(np.int32(time)))
    assert times[:70] == [*range(66), 33, 34, 35, 36] and times[99] == 33


@pytest.mark.parametrize(
    ("options", "num_envs", "message"),
    [
        ({"samples_per_insert": 4e-5}, 8, "needs samples_per_insert of at least 0.0001, got 4e-05"),
        ({"samples_per_insert": 1000.123}, 4096, "the fraction 1000123 / 1000., 4096 environments"),
        ({"capacity": 2**31}, 8, "numbers the timesteps of a replay with 32 bits, .* Lower --replay-capacity"),
    ],
)
def test_replay_whose_counters_could_overflow_is_refused(options, num_envs, message):
    spec = ReplaySpec("uniform", Transition(1), **{"batch_size": 256, "capacity": 100, **options})
    with pytest.raises(UsageError, match=message):
        StepRing(spec, num_envs)


def test_sum_tree_draws_in_proportion_to_the_leaves():
    tree = DeviceSumTree(1000)
    rng = np.random.default_rng(0)
    values = np.zeros(1000, np.float32)
    levels, put = tree.init(), jax.jit(tree.set)
    for _ in range(20):
        leaves = rng.integers(0, 1000, 16)
        values[leaves] = new = (rng.random(16) * (rng.random(16) < 0.7)).astype(np.float32)
        values[leaves] = np.array([new[np.flatnonzero(leaves == leaf)[-1]] for leaf in leaves])
        levels = put(levels, leaves, values[leaves])
    np.testing.assert_allclose(levels[-1].sum(), values.sum(), rtol=1e-6)
    drawn, probabilities = jax.jit(tree.draw, static_argnums=2)(jax.random.PRNGKey(0), levels, 100_000)
    np.testing.assert_allclose(probabilities, values[drawn] / values.sum(), rtol=1e-5)
    counts = np.bincount(drawn, minlength=1000)
    np.testing.assert_allclose(counts / 100_000, values / values.sum(), atol=2e-5)
