"""One measurement of a trajectory server: `python -m benchmarks.ours.trajectories ingest|queue [--published PYTHON]`.

The server is `rlframe serve trajectories` with SQLite, where every group is on disk before it is acknowledged. With
--published, it is the published in-memory server, run by a Python that has `atroposlib`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import psutil

from benchmarks.processor import processor_seconds

SEQUENCES, TOKENS = 8, 2048
CLIENTS = 8
DEADLINE = 60.0  # seconds for the server to start or to respond
BATCH_DEADLINE = 20.0  # time limit in seconds for one batch
SMALL = {"tokens": [[7] * 16] * 2, "masks": [[-100] * 8 + [7] * 8] * 2, "scores": [1.0, 0.0]}
SMALL_BATCH = 16  # sequences, that is 8 small groups


def large_group(packed: bool) -> bytes:
    """Return a group of 8 x 2048 tokens with masks and log-probabilities, in the format that clients send."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (SEQUENCES, TOKENS)).astype("<i4")
    masks = tokens.copy()
    masks[:, : TOKENS // 4] = -100
    logprobs = np.round(-rng.exponential(0.5, tokens.shape), 4).astype("<f4")
    group = {"scores": [0.5, -0.5] * (SEQUENCES // 2)}
    if not packed:
        lists = {"inference_logprobs": np.round(logprobs.astype(float), 4).tolist()}
        return json.dumps({"tokens": tokens.tolist(), "masks": masks.tolist(), **group, **lists}).encode()
    arrays = {"tokens": tokens, "masks": masks, "inference_logprobs": logprobs}
    arrays["lengths"] = np.full(SEQUENCES, TOKENS, "<i4")
    return msgspec.msgpack.encode({**{name: array.tobytes() for name, array in arrays.items()}, **group})


class Server:
    """A server of either kind, with a registered trainer and environment."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self._http = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body)
        self._http.request(method, path, data, {"Content-Type": "application/json"})
        with self._http.getresponse() as response:
            content = response.read()
            if response.status != 200:
                raise RuntimeError(f"{method} {path}: {response.status} {content[:200]!r}")
        return json.loads(content)

    def disconnect(self) -> None:
        """Close the connection. The next request opens a new one."""
        self._http.close()

    def register(self, batch_size: int, group_size: int) -> None:
        settings = {"wandb_group": "", "wandb_project": "", "batch_size": batch_size, "max_token_len": TOKENS}
        settings |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1_000_000}
        self.request("POST", "/register", settings)
        self.request("GET", "/batch")
        env = {"max_token_length": TOKENS, "desired_name": "env", "weight": 1.0, "group_size": group_size}
        assert self.request("POST", "/register-env", env)["env_id"] == 0

    def cpu(self) -> float:
        """Return the seconds of processor time so far."""
        return processor_seconds(self.process.pid)

    def resident(self) -> int:
        """Return the resident memory in bytes."""
        return psutil.Process(self.process.pid).memory_info().rss

    def status_env(self, seconds: float, pause: float) -> dict[str, float]:
        """Return the milliseconds of `/status-env` over repeated requests."""
        times, cpu = [], self.cpu()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            self.request("GET", "/status-env", {"env_id": 0})
            times.append(1e3 * (time.perf_counter() - start))
            time.sleep(pause)
        cpu = self.cpu() - cpu
        times.sort()
        return {
            "median": statistics.median(times),
            "p99": times[int(0.99 * (len(times) - 1) + 0.5)],
            "asked": len(times),
            "processor_us": 1e6 * cpu / len(times),
        }

    def batches(self, count: int) -> dict[str, float]:
        """Return median milliseconds and processor time of `/batch`, or {} if a batch exceeds `BATCH_DEADLINE`."""
        self.disconnect()
        self._http.timeout = BATCH_DEADLINE
        times, cpu = [], self.cpu()
        with contextlib.suppress(TimeoutError):
            for _ in range(count):
                start = time.perf_counter()
                assert self.request("GET", "/batch")["batch"], "The server returned no batch."
                times.append(1e3 * (time.perf_counter() - start))
        if len(times) < count:
            return {}
        return {"median": statistics.median(times), "processor_us": 1e6 * (self.cpu() - cpu) / count}


@contextlib.contextmanager
def serving(published: str | None) -> Iterator[Server]:
    """Run the server in a separate process with a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="rlframe-bench-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        if published is None:
            command = [sys.executable, "-m", "rlframe", "serve", "trajectories", "--port", port]
            command += ["--store", f"sqlite:{folder}/queue.db"]
        else:
            command = [published, "-m", "uvicorn", "atroposlib.api:app", "--port", port, "--log-level", "warning"]
        with open(pathlib.Path(folder, "log"), "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        try:
            server = Server(process, f"http://127.0.0.1:{port}")
            end = time.monotonic() + DEADLINE
            while True:
                try:
                    server.request("GET", "/")
                    break
                except ConnectionError:
                    server.disconnect()
                    if process.poll() is not None or time.monotonic() > end:
                        raise RuntimeError(pathlib.Path(folder, "log").read_text()[-500:]) from None
                    time.sleep(0.05)
            yield server
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def posting(server: Server, packed: bool, seconds: float, result: dict[str, Any]) -> Iterator[None]:
    """Post from all clients at full speed.

    At the end, `result` contains groups/s, and processor time and memory per group.
    """
    with tempfile.NamedTemporaryFile() as file:
        body = large_group(packed)
        file.write(body)
        file.flush()
        kind = "application/msgpack" if packed else "application/json"
        command = [sys.executable, "-m", "benchmarks.ours.posts", f"{server.url}/scored_data", file.name]
        command += ["--content-type", kind, "--connections", str(CLIENTS), "--seconds", str(seconds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdin and clients.stdout
            assert clients.stdout.readline() == "ready\n"
            resident, cpu = server.resident(), server.cpu()
            clients.stdin.close()
            yield
            result |= json.loads(clients.stdout.readline())
            groups = max(1, result["posts"])
            result["cpu_ms"] = 1e3 * (server.cpu() - cpu) / groups
            result["processor_us"] = 1e3 * result["cpu_ms"]
            result["memory_per_byte"] = (server.resident() - resident) / (groups * len(body))


def ingest(server: Server, packed: bool, seconds: float) -> dict[str, Any]:
    """Return groups/s for large groups, and the server's memory for the queued groups."""
    server.register(batch_size=64, group_size=SEQUENCES)
    result: dict[str, Any] = {}
    with posting(server, packed, seconds, result):
        pass
    batches = server.batches(3)
    return {**result, "batch": batches.get("median"), "batch_us": batches.get("processor_us")}


def queue(server: Server, groups: int, seconds: float) -> dict[str, Any]:
    """Return the durations of small requests while `groups` small groups are queued."""
    server.register(batch_size=SMALL_BATCH, group_size=2)
    before, start, chunk = server.resident(), time.perf_counter(), 1000
    for _ in range(groups // chunk):
        server.request("POST", "/scored_data_list", [SMALL] * chunk)
    result: dict[str, Any] = {"fill_seconds": time.perf_counter() - start}
    result["memory_per_byte"] = (server.resident() - before) / (groups * len(json.dumps(SMALL)))
    result["idle"] = server.status_env(seconds / 2, pause=0.002)
    load: dict[str, Any] = {}
    with posting(server, packed=False, seconds=seconds, result=load):
        time.sleep(1.0)  # warm-up of the clients
        result["loaded"] = server.status_env(seconds, pause=0.005)
    result["loaded"]["processor_us"] = load["processor_us"]  # per post, including the status requests
    result["load"] = load
    result["batch"] = server.batches(20)
    return result


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=("ingest", "queue"))
    parser.add_argument("--published", help="a Python that has atroposlib")
    parser.add_argument("--packed", action="store_true", help="MessagePack with binary arrays")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--groups", type=int, default=100_000)
    args = parser.parse_args()
    with serving(args.published) as server:
        if args.workload == "ingest":
            result = ingest(server, args.packed, args.seconds)
        else:
            result = queue(server, args.groups, args.seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
