"""The queue in device memory returns each unroll once, in order."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rlframe.device.replay import UnrollQueue
from rlframe.testing.streams import ReferenceReplay, StepStream
from rlframe.types import ReplaySpec, Sequence
from tests.device.test_ring import NUM_ENVS, RNG, compare, to_record


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
