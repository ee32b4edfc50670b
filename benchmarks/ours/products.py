"""Times an update of two networks as small parts are compiled and as XLA has it by itself, for sizes of their layers.

`_LARGE_PRODUCT` in `rlframe/compilation.py` is the size from which the second is quicker. Two networks, 17 inputs, two
layers, one output, Adam; each size as one call and as sixteen updates in a scan. Prints one JSON object for each size,
in milliseconds of an update.

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
TURNS, SECONDS = 3, 0.12


def main() -> None:
    """Measures both ways, in turns."""
    small = {name: value for name, value in compilation._FOR_SMALL_PARTS.items() if compilation._accepts(name, value)}
    for rows, width in SIZES:
        found: dict[str, Any] = {"rows": rows, "width": width, "million_operations": 2 * rows * width**2 / 1e6}
        update, carry, inputs = _update(rows, width)
        for loops in (1, LOOPS):
            function = _in_scan(update) if loops > 1 else update
            ways = {"small parts": small, "by itself": {}}
            compiled = {way: jax.jit(function, compiler_options=options) for way, options in ways.items()}
            turns: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(TURNS + 1):  # the first one compiles
                for way, call in compiled.items():
                    taken = _seconds(call, carry, inputs) / loops
                    if turn > 0:
                        turns[way].append(taken)
            suffix = ", in a scan" if loops > 1 else ""
            found |= {way + suffix: round(1e3 * statistics.median(taken), 3) for way, taken in turns.items()}
        print(json.dumps(found), flush=True)


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


def _seconds(call: Callable[[Any, Any], Any], carry: Any, inputs: np.ndarray) -> float:
    """Of one call, over `SECONDS`."""
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        carry = call(carry, inputs)
        calls += 1
    jax.block_until_ready(carry)
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    main()
