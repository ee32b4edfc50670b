"""Tests of the compiler options for functions on the CPU. The options change the speed but not the results."""

from __future__ import annotations

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlframe
from rlframe import compilation


def convolve(image):
    kernel = jnp.ones((1, 1, 2, 2))
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID")


def options_of(monkeypatch, function, differentiates, *args):
    """Call the function through `jit`. Return the compiler options that the last call of `jax.jit` received."""
    seen, real = [], jax.jit
    # The first call also checks which options XLA supports, with other calls of `jax.jit`.
    compilation.jit(function, differentiates=differentiates)(*args)

    def spy(f, **kwargs):
        seen.append(kwargs.get("compiler_options"))
        return real(f, **kwargs)

    monkeypatch.setattr(jax, "jit", spy)
    compilation.jit(function, differentiates=differentiates)(*args)
    return seen[-1]


def loop(function):
    return lambda x: jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=2)[0]


def product(width):
    """Return a function that multiplies two [width, width] matrices. This takes 2 width^3 operations."""
    return lambda x: x + (jnp.ones((width, width)) @ jnp.full((width, width), x.sum()))[0, 0]


IMAGE = np.ones((1, 1, 4, 4), np.float32)
# Newer versions of XLA have no older runtime. For these versions, `jit` selects another scheduler.
OLD = jax.__version_info__ < (0, 6)
NEW_RUNTIME = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
NOT_SMALL = {} if OLD else NEW_RUNTIME
SMALL = {"xla_cpu_use_thunk_runtime": False} if OLD else NEW_RUNTIME


ONE_THREAD = {"xla_cpu_multi_thread_eigen": False}


def in_half(image):
    return (image.astype(jnp.bfloat16) @ image.astype(jnp.bfloat16)).astype(jnp.float32)


def of_batches(image):
    return jnp.einsum("abij,abjk->abik", image, image)


def of_numpy(image):
    return jax.pure_callback(np.sin, image, image)


def unrolled(image):
    """Compute a gradient as in a recurrent network, with a forward loop and a backward loop over the steps."""
    return jax.grad(lambda x: loop(lambda x: jnp.tanh(x @ x))(x).sum())(image)


@pytest.mark.parametrize(
    ("function", "differentiates", "expected"),
    [
        (jnp.sum, False, {**SMALL, **ONE_THREAD}),
        (jnp.sum, True, SMALL),
        (convolve, False, NOT_SMALL),
        (convolve, True, None),
        (jax.jit(convolve), True, None),  # The convolution is in an inner function.
        (loop(lambda x: x @ x), True, SMALL),
        (
            loop(lambda x: loop(lambda x: x + x)(x) @ x),
            True,
            SMALL,
        ),  # like a scan over advantages inside a loop over minibatches
        (lambda x: loop(lambda x: x + x)(x) @ x, True, SMALL),
        (loop(lambda x: x @ x), False, {**SMALL, **ONE_THREAD}),
        (lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x), True, SMALL),
        (unrolled, True, NOT_SMALL),
        (loop(unrolled), True, NOT_SMALL),
        (product(200), True, None),
        (loop(product(200)), True, None),
        (product(200), False, {**NOT_SMALL, **ONE_THREAD}),
        (product(100), True, SMALL),
        (product(100), False, {**SMALL, **ONE_THREAD}),
        (in_half, True, NOT_SMALL),
        (of_batches, False, {**NOT_SMALL, **ONE_THREAD}),
        (of_numpy, False, {**NOT_SMALL, **ONE_THREAD}),
        (jnp.fft.fft, False, {**NOT_SMALL, **ONE_THREAD}),
        (jnp.linalg.inv, False, {**NOT_SMALL, **ONE_THREAD}),
    ],
)
def test_compiler_options_depend_on_the_operations(monkeypatch, function, differentiates, expected):
    assert options_of(monkeypatch, function, differentiates, IMAGE) == expected


def test_compile_ahead_traces_once_and_the_first_call_compiles_nothing(caplog):
    traced = []

    def double(x):
        traced.append(x.shape)
        return x * 2

    function = compilation.jit(double, differentiates=False)
    function.compile_ahead(jax.ShapeDtypeStruct((3,), jnp.float32))
    with jax.log_compiles():  # for this thread only
        np.testing.assert_array_equal(function(np.ones(3, np.float32)), np.full(3, 2.0))
    assert traced == [(3,)] and "XLA compilation of jit(double" not in caplog.text
    np.testing.assert_array_equal(function(np.ones(4, np.float32)), np.full(4, 2.0))  # another shape


def test_error_of_a_compilation_ahead_is_raised_by_the_first_call():
    unknown = jax.ffi.ffi_call("rlframe_has_no_such_function", jax.ShapeDtypeStruct((), jnp.float32))
    function = compilation.jit(lambda x: unknown(x), differentiates=False)
    function.compile_ahead(jnp.float32(1.0))
    for _ in range(2):
        with pytest.raises(Exception, match="rlframe_has_no_such_function"):
            function(jnp.float32(1.0))


def test_error_of_the_function_is_raised_by_compile_ahead_and_by_the_call():
    function = compilation.jit(lambda x: x @ jnp.ones(3), differentiates=False)
    with pytest.raises(TypeError, match="dot_general"):
        function.compile_ahead(jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(TypeError, match="dot_general"):
        function(np.ones(2, np.float32))


@pytest.mark.skipif(not OLD, reason="this XLA has no older runtime")
def test_function_is_compiled_again_for_the_default_runtime_if_a_batch_is_large(monkeypatch):
    function = compilation.jit(lambda x: x @ jnp.ones((256, 256)), differentiates=False)
    seen, real = [], jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda f, **options: seen.append(options.get("compiler_options")) or real(f, **options)
    )
    for rows in (1, 2, 256, 1):
        np.testing.assert_allclose(function(np.ones((rows, 256), np.float32)), np.full((rows, 256), 256.0))
    assert [options for options in seen if options] == [{**SMALL, **ONE_THREAD}, ONE_THREAD]


@pytest.mark.skipif(not OLD, reason="this XLA has no older runtime")
def test_function_for_the_older_runtime_refuses_a_large_batch(monkeypatch):
    function = compilation.jit(lambda x: x @ jnp.ones((256, 256)), differentiates=False)
    small, large = np.ones((1, 256), np.float32), np.ones((256, 256), np.float32)
    function(small)
    older = function._jitted  # Another thread could still call the older function.
    function(large)
    assert function._jitted is not older
    with pytest.raises(compilation._UnsuitableShapesError):
        older(large)
    newer = function._jitted
    monkeypatch.setattr(function, "_jitted", older)
    np.testing.assert_allclose(function(large), np.full((256, 256), 256.0))
    assert function._jitted not in (older, newer)


@pytest.mark.skipif(not OLD, reason="this XLA has no older runtime")
def test_concurrent_calls_compile_once_for_each_runtime(monkeypatch):
    function = compilation.jit(lambda x: x @ jnp.ones((256, 256)), differentiates=False)
    function(np.ones((1, 256), np.float32))
    chosen, begin, choose = [], threading.Barrier(4, timeout=60.0), function._choose
    monkeypatch.setattr(function, "_choose", lambda args: chosen.append(args) or choose(args))

    def call(rows):
        begin.wait()
        return float(function(np.ones((rows, 256), np.float32)).sum())

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, [256, 256, 2, 300])) == [rows * 256 * 256 for rows in (256, 256, 2, 300)]
    assert len(chosen) == 1


@pytest.mark.skipif(not OLD, reason="this XLA has no older runtime")
@pytest.mark.parametrize("agent", ["dqn", pytest.param("ppo", marks=pytest.mark.system)])
def test_functions_of_the_cartpole_presets_use_the_older_runtime(monkeypatch, tmp_path, agent):
    found, real = [], compilation.suits_older_runtime

    def spy(jaxpr):
        found.append(real(jaxpr))
        return found[-1]

    monkeypatch.setattr(compilation, "suits_older_runtime", spy)
    rlframe.train(agent, "CartPole-v1", steps=1200, run_dir=tmp_path / "run", quiet=True)
    assert len(found) >= 2 and all(found)


def test_only_the_unsupported_compiler_option_is_dropped(monkeypatch):
    monkeypatch.setattr(compilation, "_ONE_BY_ONE", {"xla_no_such_option": True})
    monkeypatch.setattr(compilation, "_OLDER_RUNTIME", {"xla_no_such_option": False})
    assert options_of(monkeypatch, jnp.sum, False, IMAGE) == {"xla_cpu_multi_thread_eigen": False}


def test_convolution_in_a_loop_is_detected(monkeypatch):
    def loop(image):
        return jax.lax.scan(lambda total, _: (total + convolve(image).sum(), None), 0.0, None, length=2)[0]

    assert options_of(monkeypatch, loop, True, IMAGE) is None


def test_jit_returns_the_results_of_jax_jit_and_donates_arrays():
    function = compilation.jit(lambda x, y: x + y, donate_argnums=(0,), differentiates=True)
    donated = jnp.ones(3)
    np.testing.assert_array_equal(function(donated, 2.0), [3.0, 3.0, 3.0])
    assert donated.is_deleted()
    np.testing.assert_array_equal(function(jnp.ones((2, 2)), 1.0), np.full((2, 2), 2.0))
