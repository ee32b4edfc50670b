"""Test that the process does not crash while JAX computes: with many sizes of layers, and while signals arrive.

Each case runs in a separate process."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # the largest images take minutes on a busy machine

ROOT = pathlib.Path(__file__).parents[1]


def act_and_learn(**case: Any) -> None:
    # Remove this variable, because it makes XLA compile code that differs from the code in a user's process.
    env = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    command = [sys.executable, "-m", "tests.act_and_learn", json.dumps(case)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800.0)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), (done.returncode, done.stdout, done.stderr)


@pytest.mark.system
def test_agent_acts_on_one_large_image_and_learns_from_eight():
    act_and_learn(shape=[210, 160, 3], batches=[1, 8], learn=[8])


@pytest.mark.system
def test_layer_with_150528_inputs_acts_and_learns():
    act_and_learn(shape=[150528], layers=[64], batches=[1, 2], learn=[2])


@pytest.mark.system
@pytest.mark.parametrize("agent", ["ppo", "dqn"])
@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        *(([inputs], [width]) for inputs in (4, 1024, 8192, 16384, 22528, 150528) for width in (64, 512)),
        *(([inputs], [512, 512]) for inputs in (4, 16384)),
        *((list(image), None) for image in ((84, 84, 4), (210, 160, 3), (512, 512, 3))),
    ],
)
def test_every_size_acts_and_learns(agent: str, shape: list[int], layers: list[int] | None):
    act_and_learn(agent=agent, shape=shape, layers=layers)


SIGNALS = """
import os, signal, threading, time
import jax, numpy as np
from rlframe import compilation

received, end = [], time.monotonic() + 2.0
signal.signal(signal.SIGUSR1, lambda *_: received.append(1))

def send():
    while time.monotonic() < end:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.0005)

threading.Thread(target=send, daemon=True).start()
matrix = np.ones((256, 256), np.float32)
multiply = jax.jit(lambda x: [x @ x + i for i in range(4)])
while time.monotonic() < end:
    jax.block_until_ready(multiply(matrix))
    others = [np.ones(1 + len(received) % 3000) for _ in range(20)]  # use the heap
assert len(received) > 100
print("done")
"""


def test_signals_during_a_matrix_product_do_not_damage_the_heap():
    done = subprocess.run([sys.executable, "-c", SIGNALS], cwd=ROOT, capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0 and done.stdout == "done\n", (done.returncode, done.stdout, done.stderr)
