"""Times small networks by XLA's older CPU runtime and by the default one, for sizes of their layers and batches.

`is_small` in `rlframe/compilation.py` rests on these figures. Learning: an update of two networks (17 inputs, two
layers, one output) with Adam, as one call and as sixteen updates in a scan, in milliseconds of an update. Acting: a
call of one network (two layers, four outputs), numpy to numpy, in microseconds. Prints one JSON object for each size.

python -m benchmarks.ours.products
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlframe import compilation

INPUTS, LOOPS = 17, 16
SIZES = (  # (rows, width)
    *((64, 64), (256, 64), (64, 128), (128, 120), (512, 64), (32, 256), (64, 200), (768, 64)),
    *((1024, 64), (256, 128), (64, 256), (512, 128), (128, 256), (256, 256)),
)
ACTING = tuple(  # (rows, inputs, width)
    (rows, inputs, width)
    for rows in (1, 2, 8, 64)
    for inputs, width in ((4, 64), (17, 256), (64, 512), (1024, 512), (4096, 512))
)
MOST_OPERATIONS = 2**24  # of a product by the older runtime: from here on it may end the process
TURNS, SECONDS = 3, 0.12


def main() -> None:
    """Measure both ways, in turns."""
    older = _options(compilation._OLDER_RUNTIME, compilation._ONE_BY_ONE)
    for rows, width in SIZES:
        found: dict[str, Any] = {"rows": rows, "width": width, "million_operations": 2 * rows * width**2 / 1e6}
        update, carry, inputs = _update(rows, width)
        for loops in (1, LOOPS):
            function = _in_scan(update) if loops > 1 else update
            taken = _medians({"older": (function, older), "default": (function, {})}, carry, inputs, _seconds_of_update)
            suffix = ", in a scan" if loops > 1 else ""
            found |= {way + suffix: round(1e3 * seconds / loops, 3) for way, seconds in taken.items()}
        print(json.dumps(found), flush=True)
    one_thread = _options(compilation._ONE_THREAD)
    for rows, num_inputs, width in ACTING:
        act, params, inputs = _acting(rows, num_inputs, width)
        operations = 2 * rows * width * max(num_inputs, width)
        ways = {"older": (act, older | one_thread), "default": (act, {}), "default, one thread": (act, one_thread)}
        if operations >= MOST_OPERATIONS:
            del ways["older"]
        sizes = {"rows": rows, "inputs": num_inputs, "width": width, "million_operations": operations / 1e6}
        taken = _medians(ways, params, inputs, _seconds_of_action)
        print(json.dumps(sizes | {way: round(1e6 * seconds, 1) for way, seconds in taken.items()}), flush=True)


def _options(*groups: dict[str, Any]) -> dict[str, Any]:
    return {name: value for group in groups for name, value in group.items() if compilation._accepts(name, value)}


def _medians(
    ways: dict[str, tuple[Callable[..., Any], dict[str, Any]]],
    first: Any,
    inputs: np.ndarray,
    measure: Callable[..., float],
) -> dict[str, float]:
    """{way: seconds of a call}."""
    calls = {way: jax.jit(function, compiler_options=options) for way, (function, options) in ways.items()}
    turns: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 1):  # the first one compiles
        for way, call in calls.items():
            taken = measure(call, first, inputs)
            if turn > 0:
                turns[way].append(taken)
    return {way: statistics.median(taken) for way, taken in turns.items()}


def _acting(rows: int, num_inputs: int, width: int) -> tuple[Callable[[Any, Any], Any], Any, np.ndarray]:
    """(a function of (parameters, inputs) that gives actions, parameters, inputs [rows, num_inputs])."""
    inputs = np.random.default_rng(0).standard_normal((rows, num_inputs)).astype(np.float32)
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([width, width, 4], activation=jnp.tanh)(x)))
    params = network.init(jax.random.PRNGKey(0), inputs)
    return lambda params, inputs: jnp.argmax(network.apply(params, inputs), axis=-1), params, inputs


def _update(rows: int, width: int) -> tuple[Callable[[Any, Any], Any], Any, np.ndarray]:
    """(an update of (parameters, optimizer state), that pair, inputs [rows, INPUTS])."""
    inputs = np.random.default_rng(0).standard_normal((rows, INPUTS)).astype(np.float32)
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([width, width, 1], activation=jnp.tanh)(x)))
    params = [network.init(jax.random.PRNGKey(seed), inputs) for seed in range(2)]
    optimizer = optax.adam(1e-3)

    def loss(params: Any, inputs: Any) -> jax.Array:
        return sum(jnp.mean(jnp.square(network.apply(each, inputs) - 1.0)) for each in params)

    def update(carry: Any, inputs: Any) -> Any:
        params, opt_state = carry
        updates, opt_state = optimizer.update(jax.grad(loss)(params, inputs), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update, (params, optimizer.init(params)), inputs


def _in_scan(update: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda carry, inputs: jax.lax.scan(lambda c, _: (update(c, inputs), None), carry, None, length=LOOPS)[0]


def _seconds_of_update(call: Callable[[Any, Any], Any], carry: Any, inputs: np.ndarray) -> float:
    """Of one call, over `SECONDS`."""
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        carry = call(carry, inputs)
        calls += 1
    jax.block_until_ready(carry)
    return (time.perf_counter() - began) / calls


def _seconds_of_action(call: Callable[[Any, Any], Any], params: Any, inputs: np.ndarray) -> float:
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        np.asarray(call(params, inputs))
        calls += 1
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    main()
