"""Replays in device memory return the same items as a reference replay from the same steps."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from rlframe.device.ring import StepRecord, StepRing, UnrollQueue
from rlframe.device.sum_tree import DeviceSumTree
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
    length = ring._span if period > 1 or ring._span > 3 else 0
    mask = (times >= 0) & (times % period == 0) & (times + length <= state.head)
    times, envs = (grid.ravel() for grid in np.meshgrid(times, np.arange(NUM_ENVS), indexing="ij"))
    return times, envs, np.repeat(mask, NUM_ENVS) & np.asarray(is_item(state, times, envs))


@pytest.mark.parametrize(("kind", "item"), KINDS_AND_ITEMS)
def test_ring_contains_the_items_of_the_reference_replay(kind, item):
    spec = ReplaySpec(kind, item, batch_size=16, capacity=60, min_size=10)
    ring, stream, reference = StepRing(spec, NUM_ENVS), StepStream(NUM_ENVS), ReferenceReplay(item)
    reference.claim_rank(NUM_ENVS, 0)
    add, draw = jax.jit(ring.add_step), jax.jit(ring.draw_places)
    read, is_item = jax.jit(ring.read), jax.jit(ring._is_item)
    state = None
    for _ in range(60):
        ids, step = stream.step()
        record = to_record(step)
        state = ring.init(record) if state is None else state
        state = add(state, record)
        reference.add(ids, step)
        times, envs, mask = places_of_items(ring, state, is_item)
        assert int(state.size) == mask.sum()
        if not mask.any():
            continue
        data = read(state, times, envs, np.ones(len(times), np.float32)).data
        found = compare(data, reference, mask)
        # The ring has the newest items, and no others.
        newest = sorted(reference.items)[-len(found) :]
        assert sorted(found) == newest
        if state.head < ring.rows:
            assert len(found) == len(reference.items)
        times, envs, probabilities, state = draw(RNG, state)
        drawn = compare(read(state, times, envs, probabilities).data, reference)
        assert len(drawn) == spec.batch_size
        assert set(drawn) <= set(found)
        np.testing.assert_allclose(probabilities, 1 / len(found), rtol=1e-5)


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


@pytest.mark.parametrize("batch_size", [None, 3, 6, *(pytest.param(one, marks=pytest.mark.system) for one in (4, 8))])
def test_queue_returns_each_unroll_once_in_order(batch_size):
    item = Sequence(3)
    queue = UnrollQueue(ReplaySpec("queue", item, batch_size, capacity=100), NUM_ENVS)
    size, stream, reference = batch_size or NUM_ENVS, StepStream(NUM_ENVS), ReferenceReplay(item)
    reference.claim_rank(NUM_ENVS, 0)
    state, seen = None, []

    add, draw = jax.jit(queue.add), jax.jit(queue.draw)
    for _ in range(10):
        records = []
        for _ in range(3):
            ids, step = stream.step()
            reference.add(ids, step)
            records.append(to_record(step))
        state = queue.init(records[0]) if state is None else state
        state = add(state, jax.tree.map(lambda *leaves: np.stack(leaves), *records))
        while queue.is_ready(state):
            state, batch, _ = draw(RNG, state)
            seen += compare(batch.data, reference)
            assert len(batch.data.reward) == size
    assert (queue.updates_per_round == "one") == (size == NUM_ENVS)
    assert seen == list(reference.items)[: len(seen)]
    assert len(reference.items) - len(seen) < size


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
