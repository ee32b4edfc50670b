"""Choose XLA's compiler options for jitted functions on the CPU. Accelerators ignore these options.

JAX before 0.6 has two CPU runtimes. With the older one, a small network acts in two thirds of the time and trains twice
as fast. But the older runtime can crash the process: it passes large matrix products to oneDNN, which crashes for some
shapes. So `jit` uses XLA's default runtime, except for functions that are safe and faster with the older one. The
measurements are in docs/project/speed.md.

Later versions of JAX have only the newer runtime. It is slow for small functions, because it splits each call between
threads. For these versions, `jit` selects the memory-optimized scheduler, which runs the parts one after another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rlframe.interprocess.heartbeat import COMPILING
from rlframe.interprocess.processes import use_signal_stack

use_signal_stack()  # JAX's matrix products need it

# By default, JAX passes calls to another thread, which makes a call of 30 us take 60 us. JAX reads this setting when it
# creates its CPU client, so this module must be imported before the first array is created.
if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
    jax.config.update("jax_cpu_enable_async_dispatch", False)

# JAX writes paths of source files into compiled code, and fails if a path is not valid UTF-8. With this setting, JAX
# removes the invalid characters, which the regular expression matches.
_PATH_REGEX_OPTION = "jax_hlo_source_file_canonicalization_regex"
if getattr(jax.config, _PATH_REGEX_OPTION) is None:
    jax.config.update(_PATH_REGEX_OPTION, "[\udc80-\udcff]")

_NUMBERS = itertools.count()  # makes the names of compiled functions unique

_Options = dict[str, bool | int | str]

# `_accepted` drops the options that the installed XLA does not support.
_OLDER_RUNTIME: _Options = {"xla_cpu_use_thunk_runtime": False}
_ONE_BY_ONE: _Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
_ONE_THREAD: _Options = {"xla_cpu_multi_thread_eigen": False}
_UNOPTIMIZED: _Options = {"xla_backend_optimization_level": 0}

# Limit for the floating-point operations in one matrix product. Above it, the newer runtime is faster. The older
# runtime uses oneDNN for products of 2^24 operations or more, or of 2^19 or more with batch dimensions.
_LARGE_PRODUCT = 8e6

# JAX primitives that occur in small dense networks, their losses and their optimizers.
_PRIMITIVES = """
    abs add add_any and argmax argmin bitcast_convert_type broadcast_in_dim ceil clamp concatenate cond
    convert_element_type copy cos cumsum custom_jvp_call device_put div dot_general dynamic_slice dynamic_update_slice
    eq erf erf_inv exp expm1 floor gather ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg
    nextafter not or pad pjit pow random_bits random_fold_in random_seed random_split random_unwrap random_wrap
    reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum rem reshape rev round rsqrt scan scatter
    scatter-add select_n shift_right_logical sign sin slice sort split sqrt square squeeze stop_gradient sub tanh
    transpose while xor
"""
_KNOWN = frozenset(_PRIMITIVES.split())


class jit:
    """A variant of `jax.jit` that chooses CPU compiler options for each function.

    Args:
        function: as for `jax.jit`.
        donate_argnums: as for `jax.jit`.
        differentiates: True for functions that compute gradients (a learner's update), False for acting.
    """

    def __init__(
        self, function: Callable[..., Any], *, donate_argnums: tuple[int, ...] = (), differentiates: bool
    ) -> None:
        self._function = function
        self._donate_argnums = donate_argnums
        self._differentiates = differentiates
        self._jitted: Callable[..., Any] | None = None
        self._choosing = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Call the function, and compile it for new shapes. Thread-safe."""
        jitted = self._jitted
        if jitted is not None:
            try:
                return jitted(*args)
            except _UnsuitableShapesError:
                pass
        with COMPILING:
            with self._choosing:
                if self._jitted is jitted:  # otherwise another thread has already replaced `_jitted`
                    chosen = self._choose(args)
                    result = chosen(*args)  # other threads wait, because each of them would compile it again
                    self._jitted = chosen
                    return result
            return self(*args)

    def compile_ahead(self, *args: Any) -> None:
        """Trace the function now, and compile it in another thread. The first call waits for this thread.

        If the compilation fails, the first call compiles again, and raises the error.

        Args:
            args: arguments of the first call, or `jax.ShapeDtypeStruct` in place of arrays.
        """
        self._choosing.acquire()  # the thread releases the lock
        try:
            chosen = self._choose(args)
            lowered = chosen.lower(*args)

            def compile_and_release() -> None:
                try:
                    with COMPILING, contextlib.suppress(Exception):
                        lowered.compile()
                        self._jitted = chosen
                finally:
                    self._choosing.release()

            threading.Thread(target=compile_and_release, name="rlframe compilation").start()
        except BaseException:
            self._choosing.release()
            raise

    def _choose(self, args: tuple[Any, ...]) -> Any:
        small: list[tuple[int, ...]] | None = _shapes(args)  # shapes that suit the older runtime; None without it

        def if_small(*args: Any) -> Any:
            # JAX runs this function only to trace it for new shapes. If the batch is larger, a matrix product can be
            # too large for the older runtime.
            if small is not None and _shapes(args) != small:
                jaxpr = jax.make_jaxpr(self._function)(*args).jaxpr
                if not suits_older_runtime(jaxpr):
                    raise _UnsuitableShapesError
            return self._function(*args)

        # In jaxlib 0.5.3, the second of two equal functions with equal names could return without running its loop
        # (tests/programs/test_fused.py, two runs in one process). So each compiled function gets its own name.
        if_small.__name__ = if_small.__qualname__ = (
            f"{getattr(self._function, '__name__', 'function')}_{next(_NUMBERS)}"
        )
        # Pass the same function object to both calls of `jax.jit`, so that JAX traces it only once.
        plain = jax.jit(if_small, donate_argnums=self._donate_argnums)
        if jax.default_backend() != "cpu":
            small = None
            return plain
        jaxpr = plain.trace(*args).jaxpr.jaxpr
        options = _accepted(self._options(jaxpr))
        if options is None or not _OLDER_RUNTIME.keys() <= options.keys():
            small = None
        if options is None:
            return plain
        return jax.jit(if_small, donate_argnums=self._donate_argnums, compiler_options=options)

    def _options(self, jaxpr: Any) -> _Options | None:
        """Return the compiler options for a function. None means XLA's defaults."""
        convolves = any(equation.primitive.name == "conv_general_dilated" for equation in _equations(jaxpr))
        if self._differentiates and (convolves or _largest_product(jaxpr) >= _LARGE_PRODUCT):
            return None
        threads = {} if convolves or self._differentiates else _ONE_THREAD
        runtime = _OLDER_RUNTIME if suits_older_runtime(jaxpr) else {}
        return {**runtime, **_ONE_BY_ONE, **threads}


def jit_once(function: Callable[..., Any]) -> Any:
    """Return a variant of `jax.jit` for a function that runs once. On a CPU, it compiles fast, without optimization."""
    options = _accepted(_UNOPTIMIZED) if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options or None)


class _UnsuitableShapesError(Exception):
    """The function must not use the older runtime with the shapes of its arguments."""


def suits_older_runtime(jaxpr: Any) -> bool:
    """Return True if a function is known to be safe and faster with XLA's older CPU runtime.

    Requirements:
    - `_KNOWN` contains all operations of the function. Convolutions are not in it.
    - Each matrix product is float32, has no batch dimensions, and needs fewer than 8 million operations.
    - No backward scan contains matrix products. (The update of a recurrent network has such a scan.)
    """
    equations = list(_equations(jaxpr))
    if any(equation.primitive.name not in _KNOWN for equation in equations):
        return False
    if not all(_is_small_product(each) for each in equations if each.primitive.name == "dot_general"):
        return False
    return not any(_multiplies(each) for each in equations if each.params.get("reverse"))


def _is_small_product(equation: Any) -> bool:
    _, (batch, _) = equation.params["dimension_numbers"]
    arrays = [*equation.invars, *equation.outvars]
    return not batch and _operations(equation) < _LARGE_PRODUCT and all(a.aval.dtype == np.float32 for a in arrays)


def _multiplies(scan: Any) -> bool:
    inner = (equation for each in _inner(scan) for equation in _equations(each))
    return any(equation.primitive.name == "dot_general" for equation in inner)


def _largest_product(jaxpr: Any) -> float:
    """Return the number of floating-point operations of the largest matrix product."""
    products = (equation for equation in _equations(jaxpr) if equation.primitive.name == "dot_general")
    return max(map(_operations, products), default=0.0)


def _operations(product: Any) -> float:
    (summed, _), _ = product.params["dimension_numbers"]
    lengths = [product.invars[0].aval.shape[axis] for axis in summed]
    return 2.0 * math.prod(product.outvars[0].aval.shape) * math.prod(lengths)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations, including those of inner functions.

    A search in the printed jaxpr would be shorter code, but printing takes half a second for PPO.
    """
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from _equations(inner)


def _inner(equation: Any) -> list[Any]:
    """Return the functions that an equation calls."""
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns"))
    leaves = [getattr(leaf, "jaxpr", leaf) for leaf in leaves]
    return [leaf for leaf in leaves if hasattr(leaf, "eqns")]


def _shapes(args: tuple[Any, ...]) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(args)]


def _accepted(options: _Options | None) -> _Options | None:
    """Return the options that the installed XLA supports."""
    if not options or _accepts(*options.items()):
        return options
    return dict(option for option in options.items() if _accepts(option))


@functools.cache
def _accepts(*options: tuple[str, bool | int | str]) -> bool:
    try:
        _lowered_identity().compile(dict(options))
    except Exception:  # the exception type differs between JAX versions
        return False
    return True


@functools.cache
def _lowered_identity() -> Any:
    return jax.jit(lambda x: x).lower(0)
