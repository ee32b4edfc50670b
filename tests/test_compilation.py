"""Which CPU options a function gets, and that they change nothing but speed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe import compilation


def convolve(image):
    kernel = jnp.ones((1, 1, 2, 2))
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID")


def options_of(monkeypatch, function, differentiates, *args):
    """The compiler options that the last call of `jax.jit` got."""
    seen, real = [], jax.jit
    compilation.jit(function, differentiates=differentiates)(*args)  # lets the check of the options run first

    def spy(f, **kwargs):
        seen.append(kwargs.get("compiler_options"))
        return real(f, **kwargs)

    monkeypatch.setattr(jax, "jit", spy)
    compilation.jit(function, differentiates=differentiates)(*args)
    return seen[-1]


def loop(function):
    return lambda x: jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=2)[0]


def product(width):
    """Of two matrices [width, width]: 2 width^3 operations."""
    return lambda x: x + (jnp.ones((width, width)) @ jnp.full((width, width), x.sum()))[0, 0]


IMAGE = np.ones((1, 1, 4, 4), np.float32)
# XLA has dropped the older runtime, and with it came another scheduler.
OLD = jax.__version_info__ < (0, 6)
NEW_RUNTIME = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
WITHOUT_OLDER_RUNTIME = {} if OLD else NEW_RUNTIME
SMALL = {"xla_cpu_use_thunk_runtime": False} if OLD else NEW_RUNTIME


@pytest.mark.parametrize(
    ("function", "differentiates", "expected"),
    [
        (jnp.sum, False, {**SMALL, "xla_cpu_multi_thread_eigen": False}),
        (jnp.sum, True, SMALL),
        (convolve, False, SMALL),
        (convolve, True, None),
        (jax.jit(convolve), True, None),  # found inside an inner function too
        (loop(lambda x: x @ x), True, SMALL),
        (lambda x: jax.jit(jnp.dot)(loop(lambda x: x @ x)(x), x), True, WITHOUT_OLDER_RUNTIME),
        (loop(lambda x: loop(lambda x: x @ x)(x) @ x), True, WITHOUT_OLDER_RUNTIME),  # in a loop over minibatches
        (lambda x: loop(lambda x: x + x)(x) @ x, True, SMALL),
        (product(200), True, None),
        (loop(product(200)), True, None),
        (product(200), False, {**SMALL, "xla_cpu_multi_thread_eigen": False}),
        (product(100), True, SMALL),
    ],
)
def test_options_follow_from_what_is_computed(monkeypatch, function, differentiates, expected):
    assert options_of(monkeypatch, function, differentiates, IMAGE) == expected


def test_an_option_that_is_refused_takes_no_other_with_it(monkeypatch):
    monkeypatch.setattr(compilation, "_FOR_SMALL_PARTS", {"xla_no_such_option": True})
    assert options_of(monkeypatch, jnp.sum, False, IMAGE) == {"xla_cpu_multi_thread_eigen": False}


def test_a_convolution_in_a_loop_is_found(monkeypatch):
    def loop(image):
        return jax.lax.scan(lambda total, _: (total + convolve(image).sum(), None), 0.0, None, length=2)[0]

    assert options_of(monkeypatch, loop, True, IMAGE) is None


def test_results_and_donation_are_those_of_jax_jit():
    function = compilation.jit(lambda x, y: x + y, donate_argnums=(0,), differentiates=True)
    donated = jnp.ones(3)
    np.testing.assert_array_equal(function(donated, 2.0), [3.0, 3.0, 3.0])
    assert donated.is_deleted()
    np.testing.assert_array_equal(function(jnp.ones((2, 2)), 1.0), np.full((2, 2), 2.0))
