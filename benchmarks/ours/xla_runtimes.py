"""Time small networks with XLA's older CPU runtime and with the default runtime, for various layer and batch sizes.

`suits_older_runtime` in `rlframe/compilation.py` is based on these figures. Acting is a call of one network (two
layers, four outputs) from numpy to numpy: microseconds, minimum of five turns. Learning is an update of two networks
(17 inputs, two layers, one output) with Adam, as one call and as sixteen updates in a scan: milliseconds per update,
medians of five turns. Prints the two tables of docs/project/speed.md, or the named one.

python -m benchmarks.ours.xla_runtimes [acting|learning]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
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
MOST_OPERATIONS = 2**24  # of one matrix product; from this size on, the older runtime may abort the process
TURNS, SECONDS = 5, 0.12


def main() -> None:
    """Print the tables named on the command line, or both."""
    tables = {"acting": _acting_table, "learning": _learning_table}
    for name in sys.argv[1:] or tables:
        tables[name]()


def _acting_table() -> None:
    older, one_thread = _options(compilation._OLDER_RUNTIME, compilation._ONE_BY_ONE), _options(compilation._ONE_THREAD)
    ways = {"older, one thread": older | one_thread, "default": {}, "default, one thread": one_thread}
    _print_row(["rows", "inputs x width", "million operations", *ways])
    _print_row(["---"] * 6)
    for rows, num_inputs, width in ACTING:
        act, params, inputs = _acting(rows, num_inputs, width)
        operations = 2 * rows * width * max(num_inputs, width)
        calls = {way: (act, options) for way, options in ways.items()}
        if operations >= MOST_OPERATIONS:
            del calls["older, one thread"]
        taken = {way: 1e6 * min(turns) for way, turns in _turns(calls, params, inputs, _seconds_of_action).items()}
        _print_row([rows, f"{num_inputs:,} x {width}", f"{operations / 1e6:.2f}", *_cells(taken, ways, 1)])


def _learning_table() -> None:
    ways = {"older": _options(compilation._OLDER_RUNTIME, compilation._ONE_BY_ONE), "newer": {}}
    _print_row(["rows x width", "million operations", *ways, *(f"{way}, in a scan" for way in ways)])
    _print_row(["---"] * 6)
    for rows, width in SIZES:
        update, carry, inputs = _update(rows, width)
        cells = []
        for loops in (1, LOOPS):
            function = _in_scan(update) if loops > 1 else update
            calls = {way: (function, options) for way, options in ways.items()}
            turns = _turns(calls, carry, inputs, _seconds_of_update)
            cells += _cells({way: 1e3 * statistics.median(turns[way]) / loops for way in ways}, ways, 2)
        _print_row([f"{rows:,} x {width}", f"{2 * rows * width**2 / 1e6:.1f}", *cells])


def _cells(taken: dict[str, float], ways: Iterable[str], digits: int) -> list[str]:
    """Format a row in the order of `ways`, the lowest figure in bold. A figure that was not measured is empty."""
    texts = {way: f"{value:,.{digits}f}" for way, value in taken.items()}
    best = texts[min(taken, key=lambda way: taken[way])]
    return [f"**{text}**" if (text := texts.get(way, "")) == best else text for way in ways]


def _print_row(cells: Iterable[Any]) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def _options(*groups: dict[str, Any]) -> dict[str, Any]:
    return {name: value for group in groups for name, value in group.items() if compilation._accepts(name, value)}


def _turns(
    ways: dict[str, tuple[Callable[..., Any], dict[str, Any]]],
    first: Any,
    inputs: np.ndarray,
    measure: Callable[..., float],
) -> dict[str, list[float]]:
    """Return {way: seconds per call in each turn}."""
    calls = {way: jax.jit(function, compiler_options=options) for way, (function, options) in ways.items()}
    turns: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 1):  # the first turn compiles
        for way, call in calls.items():
            taken = measure(call, first, inputs)
            if turn > 0:
                turns[way].append(taken)
    return turns


def _acting(rows: int, num_inputs: int, width: int) -> tuple[Callable[[Any, Any], Any], Any, np.ndarray]:
    """Return (function of (parameters, inputs) that returns actions, parameters, inputs [rows, num_inputs])."""
    inputs = np.random.default_rng(0).standard_normal((rows, num_inputs)).astype(np.float32)
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([width, width, 4], activation=jnp.tanh)(x)))
    params = network.init(jax.random.PRNGKey(0), inputs)
    return lambda params, inputs: jnp.argmax(network.apply(params, inputs), axis=-1), params, inputs


def _update(rows: int, width: int) -> tuple[Callable[[Any, Any], Any], Any, np.ndarray]:
    """Return (update of (parameters, optimizer state), this pair, inputs [rows, INPUTS])."""
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
    """Return the seconds per call, measured for `SECONDS`."""
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
