"""Times the policy server through HTTP beside its own engine asked directly, in turns. Prints one JSON object.

Both ways decode requests as `benchmarks/ours/decode.py` makes them: of many lengths, some always waiting. Through HTTP
they come as environments send them, with token ids and log-probabilities, from a process of its own, which shares the
machine's cores.

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

from benchmarks.ours.posts import Connection
from benchmarks.processor import Stopwatch
from benchmarks.report import middle, processor

SETTLING = 1.0  # seconds of a turn through HTTP before the measurement begins
TURNS = 4


def main() -> None:
    """Measures both ways; or, with --url, is the client."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("small", "large"))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each way, in all")
    parser.add_argument("--url", help="of a policy server, to send requests to until stdin is closed")
    args = parser.parse_args()
    if args.url is not None:
        send(args.url)
    else:
        print(json.dumps(measure(args.model, args.seconds)))


def measure(model_name: str, seconds: float) -> dict[str, Any]:
    """{way: tokens per second}, each the median of the turns, and the processor time for one through HTTP."""
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
                if turn:  # the first compiles
                    measured[way].append(rate)
    finally:
        server.stop()
        thread.join(60.0)
    found = {way: middle(rate["steps_per_second"] for rate in rates) for way, rates in measured.items()}
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
    while engine.stats()["running"] or engine.stats()["waiting"]:  # what the client left
        time.sleep(0.05)
    return rate


def send(url: str) -> None:
    """Twice as many connections as the engine has slots, each with one request after another."""
    slots, prompts, answers = 32, (8, 16), (32, 128)  # as in decode.py, whose imports take seconds
    rng = np.random.default_rng(0)
    ended = threading.Event()

    def work(connection: Connection) -> None:
        while not ended.is_set() and connection.post():
            pass

    connections = []
    for seed in range(2 * slots):
        asked = {
            "model": "policy",
            "prompt": rng.integers(0, 256, rng.integers(prompts[0], prompts[1] + 1)).tolist(),
            "max_tokens": int(rng.integers(answers[0], answers[1] + 1)),
            "seed": seed,
            **dict(logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, ignore_eos=True),
        }
        connections.append(Connection(f"{url}/completions", json.dumps(asked).encode(), "application/json"))
    for connection in connections:
        threading.Thread(target=work, args=(connection,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main()
