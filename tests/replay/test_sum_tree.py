"""Tests that compare the vectorized sum tree with cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest

from rlframe.replay.sum_tree import SumTree


@pytest.mark.parametrize("size", [1, 15, 16, 17, 300, 9000, 200_000])
def test_leaves_are_drawn_in_proportion_to_their_values(size: int) -> None:
    rng = np.random.default_rng(0)
    tree = SumTree(size)
    values = rng.random(size) * (rng.random(size) < 0.5)
    values[0] = 1.0
    tree.set(slice(0, size), values)
    indices, probabilities = tree.draw(200, rng)
    np.testing.assert_allclose(probabilities, tree.leaves[indices] / tree.leaves.sum(), rtol=1e-6)
    # The draws are stratified, so draw i is in the i-th part of the total.
    running = np.cumsum(tree.leaves) / tree.leaves.sum()
    low, high = running[indices] - tree.leaves[indices] / tree.leaves.sum(), running[indices]
    strata = np.arange(200) / 200
    assert (low <= strata + 1 / 200 + 1e-9).all()
    assert (high >= strata - 1e-9).all()


def test_sums_are_correct_after_ranges_and_single_leaves_were_changed() -> None:
    rng, tree = np.random.default_rng(1), SumTree(200_000)
    for step in range(60):
        if step % 2:
            low = int(rng.integers(0, 199_000))
            tree.set(slice(low, low + 700), rng.random(700))
        else:
            index = rng.integers(0, 200_000, 50)
            tree.set(index, rng.random(50))
        if step % 7 == 0 or step > 50:
            tree.refresh()
            assert tree.levels[-1].sum() == pytest.approx(tree.leaves.sum(), rel=1e-12)


def test_empty_leaf_is_never_drawn() -> None:
    rng, tree = np.random.default_rng(2), SumTree(1000)
    tree.set(np.array([3, 500, 999]), np.array([1e-12, 1.0, 1e12]))
    for _ in range(50):
        indices, _ = tree.draw(64, rng)
        assert set(indices.tolist()) <= {3, 500, 999}
