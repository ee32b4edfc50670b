"""Tests that unpacking returns exactly the tree that was packed, inside and outside of jitted calls."""

from __future__ import annotations

import copyreg
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.params.packing import PackedParams, Packing


def tree():
    return {
        "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
        "action": np.array([3, -1], np.int32),
        "key": np.array([1, 2**32 - 1], np.uint32),
        "nan": np.array(np.nan, np.float32),
        "mask": np.array([True, False]),
        "half": np.array([1.5], np.float16),
        "large": np.arange(20_000, dtype=np.float32),
    }


def assert_same(came, expected):
    assert jax.tree.structure(came) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(came), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_small_four_byte_leaves_share_one_vector():
    packed = Packing(tree()).pack_numpy(tree())
    assert packed[0].shape == (6 + 2 + 2 + 1,)
    assert sorted(leaf.dtype.name for leaf in packed[1:]) == ["bool", "float16", "float32"]


def test_pack_numpy_and_unpack_jax_return_the_tree():
    packing = Packing(tree())
    assert_same(jax.tree.map(np.asarray, jax.jit(packing.unpack_jax)(packing.pack_numpy(tree()))), tree())


def test_pack_jax_and_unpack_numpy_return_the_tree():
    packing = Packing(tree())
    assert_same(packing.unpack_numpy(jax.jit(packing.pack_jax)(jax.tree.map(jnp.asarray, tree()))), tree())


def test_unpack_numpy_returns_a_writable_copy():
    packing = Packing({"a": np.zeros(3, np.float32)})
    packed = jax.jit(packing.pack_jax)({"a": jnp.zeros(3)})
    packing.unpack_numpy(packed)["a"][:] = 7.0
    np.testing.assert_array_equal(packing.unpack_numpy(packed)["a"], [0.0, 0.0, 0.0])


@pytest.mark.parametrize("empty", [(), {"mask": np.zeros(2, bool)}])
def test_tree_without_small_leaves_can_be_packed(empty):
    packing = Packing(empty)
    assert_same(packing.unpack_numpy(jax.jit(packing.pack_jax)(empty)), empty)


def test_floats_returns_the_floating_point_numbers_in_few_arrays():
    nan_bits = np.full(2, 0x7FC00000, np.int32)  # integers with the same bits as a float NaN
    tree = {
        "a": np.float32([1.0, 2.0]),
        "b": np.float32([[3.0]]),
        "c": nan_bits,
        "d": np.float32(4.0),
        "e": np.float16([5.0]),
        "f": np.zeros(3, bool),
    }
    packing = Packing(tree)
    found = [np.asarray(each).tolist() for each in jax.jit(lambda x: packing.floats(packing.pack_jax(x)))(tree)]
    assert found == [[1.0, 2.0, 3.0], [4.0], [5.0]]


def test_packed_params_can_be_pickled_after_launchpad_changed_how_caches_are_pickled(monkeypatch):
    packed = PackedParams.of(tree())

    def refuse(cache):
        pytest.fail(f"{cache} was pickled")

    monkeypatch.setitem(copyreg.dispatch_table, type(functools.lru_cache()(lambda: None)), refuse)
    found = pickle.loads(pickle.dumps(packed))
    assert found.packing == packed.packing
    assert_same(found.unpack_numpy(), tree())
