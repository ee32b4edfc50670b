"""Compiler options of rlframe's jitted calls on the CPU. On accelerators nothing here applies.

XLA's older CPU runtime (JAX before 0.6) answers a small network's call in two thirds of the time and trains it twice as
fast. It also has faults that end the process: it gives large products of matrices to oneDNN, which crashes for some
shapes. So XLA's default runtime is the rule, and `jit` chooses the older one only for functions that are known to be
safe and faster. The measurements are in docs/performance.md.

Newer versions of XLA have only the newer runtime. It loses time on small functions because it gives the parts of a call
to several threads. There `jit` chooses the scheduler that saves memory, which runs the parts one after another.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rlframe.interprocess.phases import COMPILING

# Handing a call of 30 us over to another thread costs as much again. JAX reads this when its CPU
# client is made, so this module has to be imported before the first array.
if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
    jax.config.update("jax_cpu_enable_async_dispatch", False)

# JAX puts the paths of the code that it compiles into the result, and fails where these are not UTF-8. It removes what
# this expression matches.
_REMOVED = "jax_hlo_source_file_canonicalization_regex"
if getattr(jax.config, _REMOVED) is None:
    jax.config.update(_REMOVED, "[\udc80-\udcff]")

_Options = dict[str, bool | str]

# Options that this version of XLA does not have are left out.
_OLDER_RUNTIME: _Options = {"xla_cpu_use_thunk_runtime": False}
_ONE_BY_ONE: _Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
_ONE_THREAD: _Options = {"xla_cpu_multi_thread_eigen": False}

# Floating-point operations of one product of matrices. From here on the newer runtime is quicker, and the older one
# gives products of twice the size, 2^24, to oneDNN. (It does so from 2^19 on where a product has batch dimensions.)
_LARGE_PRODUCT = 8e6

# The primitives of small dense networks, their losses and their optimizers.
_PRIMITIVES = """
    abs add add_any and argmax argmin bitcast_convert_type broadcast_in_dim ceil clamp concatenate cond
    convert_element_type copy cos cumsum custom_jvp_call div dot_general dynamic_slice dynamic_update_slice eq erf
    erf_inv exp expm1 floor gather ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or
    pad pjit pow random_bits random_fold_in random_seed random_split random_unwrap random_wrap reduce_and reduce_max
    reduce_min reduce_or reduce_prod reduce_sum rem reshape rev round rsqrt scan scatter-add select_n
    shift_right_logical sign sin slice sort split sqrt square squeeze stop_gradient sub tanh transpose xor
"""
_KNOWN = frozenset(_PRIMITIVES.split())


class jit:
    """`jax.jit` with the CPU compiler options that suit the function.

    Args:
        function: as for `jax.jit`.
        donate_argnums: as for `jax.jit`.
        differentiates: whether the function takes gradients (a learner's update), or only acts.
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
        """Call the function. New shapes are compiled first. Any thread may call it."""
        jitted = self._jitted
        if jitted is not None:
            try:
                return jitted(*args)
            except _NotSmallError:
                pass
        with COMPILING:
            with self._choosing:
                if self._jitted is jitted:  # otherwise another thread has chosen already
                    self._jitted = self._choose(args)
            return self(*args)

    def _choose(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        small: list[tuple[int, ...]] | None = _shapes(args)  # shapes that the older runtime is chosen for

        def if_small(*args: Any) -> Any:
            # JAX runs this only to trace new shapes. A larger batch may make products too large for the older runtime.
            if small is not None and _shapes(args) != small:
                jaxpr = jax.make_jaxpr(self._function)(*args).jaxpr
                if not suits_older_runtime(jaxpr, self._differentiates):
                    raise _NotSmallError
            return self._function(*args)

        # One function object for both jits: JAX traces it once.
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
        """Return the options to compile it with, or None: as XLA has it."""
        convolves = any(equation.primitive.name == "conv_general_dilated" for equation in _equations(jaxpr))
        if self._differentiates and (convolves or _largest_product(jaxpr) >= _LARGE_PRODUCT):
            return None
        threads = {} if convolves or self._differentiates else _ONE_THREAD
        runtime = _OLDER_RUNTIME if suits_older_runtime(jaxpr, self._differentiates) else {}
        return {**runtime, **_ONE_BY_ONE, **threads}


class _NotSmallError(Exception):
    """The function with these shapes is not one for the older runtime."""


def suits_older_runtime(jaxpr: Any, differentiates: bool) -> bool:
    """Return whether a function is known to be safe and faster with XLA's older CPU runtime.

    Such a function multiplies matrices of float32, without batch dimensions, in less than 8 million operations each. It
    has no convolutions, and no operation that `_KNOWN` does not list. A function that acts has no loop. One that learns
    may have one scan of updates, and scans that multiply no matrices. (A recurrent network's update has two scans that
    multiply, forward and backward, so it is not small.)
    """
    equations = list(_equations(jaxpr))
    if any(equation.primitive.name not in _KNOWN for equation in equations):
        return False
    if not all(_is_small_product(each) for each in equations if each.primitive.name == "dot_general"):
        return False
    scans = [equation for equation in equations if equation.primitive.name == "scan"]
    return sum(map(_multiplies, scans)) <= 1 if differentiates else not scans


def _is_small_product(equation: Any) -> bool:
    _, (batch, _) = equation.params["dimension_numbers"]
    arrays = [*equation.invars, *equation.outvars]
    return not batch and _operations(equation) < _LARGE_PRODUCT and all(a.aval.dtype == np.float32 for a in arrays)


def _multiplies(scan: Any) -> bool:
    inner = (equation for each in _inner(scan) for equation in _equations(each))
    return any(equation.primitive.name == "dot_general" for equation in inner)


def _largest_product(jaxpr: Any) -> float:
    """Floating-point operations of the largest product of matrices anywhere in it."""
    products = (equation for equation in _equations(jaxpr) if equation.primitive.name == "dot_general")
    return max(map(_operations, products), default=0.0)


def _operations(product: Any) -> float:
    (summed, _), _ = product.params["dimension_numbers"]
    lengths = [product.invars[0].aval.shape[axis] for axis in summed]
    return 2.0 * math.prod(product.outvars[0].aval.shape) * math.prod(lengths)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations, of inner functions, too. (Printing a jaxpr to search it takes half a second for PPO.)"""
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
    """Return the options that this version of XLA knows."""
    if not options or _accepts(*options.items()):
        return options
    return dict(option for option in options.items() if _accepts(option))


@functools.cache
def _accepts(*options: tuple[str, bool | str]) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options=dict(options))(0)
    except Exception:  # the type differs between versions
        return False
    return True
