"""How rlframe's jitted calls are compiled for the CPU. On accelerators nothing here applies.

Measured on JAX 0.5.3 and two cores (docs/performance.md): XLA's older CPU runtime answers a small
network's call in a third of the time and trains it twice as fast, but differentiates convolutions
and updates SAC's layers of 256 at half the speed. `jit` therefore chooses for each function, by
what it computes.

Newer versions of XLA have the newer runtime alone. What it loses on small functions it loses by handing the parts of
a call over to threads, so there they run one after another, by its scheduler that saves memory.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax

from rlframe.interprocess.progress import COMPILING

# Handing a call of 30 us over to another thread costs as much again. JAX reads this when its CPU
# client is made, so this module has to be imported before the first array.
if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
    jax.config.update("jax_cpu_enable_async_dispatch", False)

_Options = dict[str, bool | str]

# Each is left out where XLA does not know it.
_OLDER_RUNTIME = "xla_cpu_use_thunk_runtime"
_FOR_SMALL_PARTS: _Options = {
    _OLDER_RUNTIME: False,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
_ONE_THREAD: _Options = {"xla_cpu_multi_thread_eigen": False}
_LARGE_PRODUCT = 8e6  # floating-point operations of one product of matrices: from here on the newer runtime is quicker


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

    def __call__(self, *args: Any) -> Any:
        """Calls the function; compiles it where the shapes are new."""
        if self._jitted is None:
            with COMPILING:
                self._jitted = self._choose(args)
                return self._jitted(*args)
        return self._jitted(*args)

    def _choose(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        plain = jax.jit(self._function, donate_argnums=self._donate_argnums)
        if jax.default_backend() != "cpu":
            return plain
        traced = plain.trace(*args)
        convolves = _convolves(traced.jaxpr.jaxpr)
        if self._differentiates and (convolves or _largest_product(traced.jaxpr.jaxpr) >= _LARGE_PRODUCT):
            return plain
        wanted = _FOR_SMALL_PARTS if convolves or self._differentiates else {**_FOR_SMALL_PARTS, **_ONE_THREAD}
        if _unrolls(traced.jaxpr.jaxpr):
            wanted = {option: value for option, value in wanted.items() if option != _OLDER_RUNTIME}
        options = {option: value for option, value in wanted.items() if _accepts(option, value)}
        return jax.jit(self._function, donate_argnums=self._donate_argnums, compiler_options=options)


def _convolves(jaxpr: Any) -> bool:
    """Whether a convolution is anywhere in it. (Printing it to look for the name takes half a second for PPO.)"""
    return _has(jaxpr, "conv_general_dilated")


def _largest_product(jaxpr: Any) -> float:
    """Floating-point operations of the largest product of matrices anywhere in it."""
    largest = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            lengths = [equation.invars[0].aval.shape[axis] for axis in summed]
            largest = max(largest, 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(lengths))
        largest = max([largest, *map(_largest_product, _inner(equation))])
    return largest


def _unrolls(jaxpr: Any) -> bool:
    """Whether a product of matrices takes what a loop over others gave, as a recurrent network's gradient does.

    From some size on, the older runtime of jaxlib 0.5.3 crashes when it compiles that: it would evaluate the loop, to
    pack a matrix for oneDNN.
    """
    from_loops: set[Any] = set()
    for equation in jaxpr.eqns:
        if any(_unrolls(inner) for inner in _inner(equation)):
            return True
        follows = any(variable in from_loops for variable in equation.invars if not hasattr(variable, "val"))
        multiplies = equation.primitive.name == "dot_general" or any(_has(i, "dot_general") for i in _inner(equation))
        loops = equation.primitive.name in ("scan", "while")
        if follows and multiplies and not loops:
            return True
        if follows or (loops and multiplies):
            from_loops.update(equation.outvars)
    return False


def _has(jaxpr: Any, primitive: str) -> bool:
    return any(
        equation.primitive.name == primitive or any(_has(inner, primitive) for inner in _inner(equation))
        for equation in jaxpr.eqns
    )


def _inner(equation: Any) -> list[Any]:
    """The functions that an equation calls."""
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns"))
    leaves = [getattr(leaf, "jaxpr", leaf) for leaf in leaves]
    return [leaf for leaf in leaves if hasattr(leaf, "eqns")]


@functools.cache
def _accepts(option: str, value: bool | str) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={option: value})(0)
    except Exception:  # the type differs between versions
        return False
    return True
