"""Time the policy server through HTTP and its engine called directly, in alternating turns. Print one JSON object.

Both ways decode the requests of `benchmarks/ours/decode.py`, with various lengths and some always waiting. HTTP
requests have the form that environments use, with token ids and log-probabilities. They come from a separate process,
which shares the cores of the machine.

python -m benchmarks.ours.policy small --seconds 5
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from benchmarks.ours.posts import PostConnection
from benchmarks.processor import Stopwatch
from benchmarks.report import median, processor

SETTLING = 1.0  # seconds of a turn through HTTP before the measurement starts
TURNS = 4


def main() -> None:
    """Measure both ways. With --url, run the HTTP client instead."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("small", "large"))
    parser.add_argument("--seconds", type=float, default=5.0, help="total seconds for each way")
    parser.add_argument("--url", help="URL of a policy server, which receives requests until stdin is closed")
    args = parser.parse_args()
    if args.url is not None:
        send(args.url)
    else:
        print(json.dumps(measure(args.model, args.seconds)))


def measure(model_name: str, seconds: float) -> dict[str, Any]:
    """Return {way: tokens per second} (medians over the turns), and the processor time per token through HTTP."""
    import jax

    from benchmarks.ours import decode
    from rlframe.language import EngineConfig
    from rlframe.language.decoding.sampling import power_of_two
    from rlframe.language.model import transformer
    from rlframe.language.server import PolicyServer, PolicyServerConfig

    config, length = decode.MODELS[model_name], power_of_two(decode.PROMPTS[1] + decode.ANSWERS[1])
    server = PolicyServer(
        PolicyServerConfig(port=0, engine=EngineConfig(slots=decode.SLOTS, length=length)),
        *(config, "byte", None, transformer.init(jax.random.key(0), config)),
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        url, engine = server.url(), server.live_engine()
        ways = {"engine": lambda: decode.decode(engine, seconds / TURNS)}
        ways["http"] = lambda: _through_http(url, engine, seconds / TURNS)
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for turn in range(TURNS + 1):
            for way, run in ways.items():
                rate = run()
                if turn:  # the first turn compiles
                    measured[way].append(rate)
    finally:
        server.stop()
        thread.join(60.0)
    found = {way: median(rate["steps_per_second"] for rate in rates) for way, rates in measured.items()}
    return {**found, "processor_us": processor(measured["http"])}


def _through_http(url: str, engine: Any, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.ours.policy", "small", "--url", url]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None and client.stdout is not None
    try:
        client.stdout.readline()
        time.sleep(SETTLING)
        watch, before = Stopwatch(), engine.stats()["tokens"]
        time.sleep(seconds)
        rate = watch.rate(engine.stats()["tokens"] - before)
    finally:
        client.stdin.close()
        client.wait(60.0)
        client.stdout.close()
    while engine.stats()["running"] or engine.stats()["waiting"]:  # wait for the remaining requests of the client
        time.sleep(0.05)
    return rate


def send(url: str) -> None:
    """Send requests one after another on twice as many connections as the engine has slots."""
    slots, prompts, answers = 32, (8, 16), (32, 128)  # copied from decode.py, whose imports take seconds
    rng = np.random.default_rng(0)
    stopped = threading.Event()

    def work(connection: PostConnection) -> None:
        while not stopped.is_set() and connection.post():
            pass

    connections = []
    for seed in range(2 * slots):
        request = {
            "model": "policy",
            "prompt": rng.integers(0, 256, rng.integers(prompts[0], prompts[1] + 1)).tolist(),
            "max_tokens": int(rng.integers(answers[0], answers[1] + 1)),
            "seed": seed,
            **dict(logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, ignore_eos=True),
        }
        connections.append(PostConnection(f"{url}/completions", json.dumps(request).encode(), "application/json"))
    for connection in connections:
        threading.Thread(target=work, args=(connection,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    stopped.set()


if __name__ == "__main__":
    main()
