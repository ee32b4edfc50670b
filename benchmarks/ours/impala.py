"""Time IMPALA on EnvPool's Pong: a whole program, or its parts alone on the same cores (also for other environments).

Prints one JSON object.

python -m benchmarks.ours.impala program heavy_env --seconds 60
python -m benchmarks.ours.impala part learner --processes 2 --threads 1 --seconds 10
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.processor import Stopwatch

ACTORS = 2
ENV = "Pong-v5"
FOREVER = 100_000_000  # environment steps
WARM_UP = 6  # updates before the clock of a program starts; the first one compiles
START_WITHIN = 240.0  # time limit in seconds for the warm-up of a program or the compilation of a part


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("program")
    command.add_argument("topology", choices=("heavy_env", "light_env", "distributed"))
    command.add_argument("--seconds", type=float, default=60.0)
    command.add_argument("--options", nargs="*", default=[], help="options of rlframe train without --: num-pools=2")
    command = commands.add_parser("part")
    command.add_argument("part", choices=PARTS)
    command.add_argument("--processes", type=int, default=1, help="independent processes; rates are summed")
    command.add_argument("--threads", type=int, default=2, help="threads per process, for the environments and for XLA")
    command.add_argument("--seconds", type=float, default=10.0)
    command.add_argument("--env", default=ENV)
    args = parser.parse_args()
    if args.command == "program":
        print(json.dumps(program(args.topology, args.seconds, args.options)))
    else:
        print(json.dumps({"steps_per_second": parts(args.part, args.processes, args.threads, args.seconds, args.env)}))


# --- the program


def program(topology: str, seconds: float, options: list[str]) -> dict[str, float]:
    """Run `rlframe train` until `seconds` after its warm-up. The rate is computed from two rows of its logs."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = pathlib.Path(directory) / "run"
        command = [sys.executable, "-m", "rlframe", "train", "--agent", "impala", "--env", ENV]
        command += ["--topology", topology, "--num-actors", ACTORS, "--steps", FOREVER, "--log-every", 1280]
        command += ["--checkpoint-every", 0, "--run-dir", run_dir, *(f"--{option}" for option in options)]
        with open(pathlib.Path(directory) / "output", "w+") as output:
            process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
            try:
                first, last, cores = _watch(process, run_dir / "metrics.jsonl", seconds)
            except RuntimeError:
                output.seek(0)
                sys.stderr.write(output.read()[-2000:])
                raise
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(60.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    duration = last["wall_seconds"] - first["wall_seconds"]
    rate = (last["step"] - first["step"]) / duration
    return {
        "steps_per_second": rate,
        "processor_us": 1e6 * cores / rate,
        "updates_per_second": (last["learner_steps"] - first["learner_steps"]) / duration,
        "staleness": last["staleness"],
    }


def _watch(
    process: subprocess.Popen, path: pathlib.Path, seconds: float
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return (first row after the warm-up, first row `seconds` later, mean number of processors used in between)."""
    deadline, warm, watch = time.monotonic() + START_WITHIN + seconds, None, Stopwatch()
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"The program ended with {process.returncode}.")
        row = _last_row(path)
        if row is not None and row["learner_steps"] >= WARM_UP:
            if warm is None:
                warm, watch = row, Stopwatch()
            if row["wall_seconds"] >= warm["wall_seconds"] + seconds:
                return warm, row, watch.processors()
        time.sleep(0.5)
    raise RuntimeError(f"The program did not complete its warm-up within {START_WITHIN:.0f} s.")


def _last_row(path: pathlib.Path) -> dict[str, Any] | None:
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else None


# --- its parts


def parts(part: str, processes: int, threads: int, seconds: float, env: str = ENV) -> float:
    """Return the environment steps per second of `processes` processes that each repeat `part`."""
    os.environ.update(NPROC=str(threads), OMP_NUM_THREADS=str(threads))
    context = multiprocessing.get_context("spawn")
    ready, rates = context.Barrier(processes), context.SimpleQueue()
    arguments = (part, processes, threads, seconds, env, ready, rates)
    children = [context.Process(target=_measure, args=arguments, daemon=True) for _ in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join(START_WITHIN + 4 * seconds)
        if child.exitcode != 0:
            raise RuntimeError(f"A process that measured {part} ended with {child.exitcode}.")
    return sum(rates.get() for _ in children)


def _measure(part: str, processes: int, threads: int, seconds: float, env: str, ready: Any, rates: Any) -> None:
    call, steps = PARTS[part](processes, threads, env)
    for _ in range(3):  # the first calls compile
        call()
    ready.wait(START_WITHIN)
    calls, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        call()
        calls += 1
    rates.put(calls * steps / (now - began))


def _objects(processes: int, threads: int, env: str) -> tuple[Any, Any, Any, Any]:
    """Return (agent, pool with a process's share of the environments, learner, inferencer) for the preset."""
    from rlframe.inferencers import Inferencer, InferencerConfig
    from rlframe.learners import Learner, LearnerConfig
    from rlframe.programs import make_experiment
    from rlframe.programs.topologies.makers import make_agent, make_pool

    described = make_experiment("impala", env, num_workers=threads, steps=FOREVER)
    pool = make_pool(described, described.num_envs // processes, described.env_kwargs, seed=0)
    agent = make_agent(described, pool.codec)
    learner = Learner(LearnerConfig(), agent, None)
    return agent, pool, learner, Inferencer(InferencerConfig(), agent, learner)


def _env(processes: int, threads: int, env: str) -> tuple[Callable[[], Any], int]:
    _, pool, _, _ = _objects(processes, threads, env)
    pool.reset()
    # Random actions instead of a constant action, so that the game proceeds as during training.
    actions = np.random.default_rng(0).integers(0, pool.action_spec.num_values, (97, pool.num_envs), np.int32)
    count = 0

    def step() -> None:
        nonlocal count
        pool.step(actions[count % 97])
        count += 1

    return step, pool.num_envs


def _inference(processes: int, threads: int, env: str) -> tuple[Callable[[], Any], int]:
    """Infer batches with the environments of one actor, for any number of processes."""
    _, pool, _, inferencer = _objects(ACTORS, threads, env)
    timestep, env_ids = pool.reset(), np.arange(pool.num_envs)
    return lambda: inferencer.inference(env_ids, timestep, ()), pool.num_envs


def _learner(processes: int, threads: int, env: str) -> tuple[Callable[[], Any], int]:
    agent, pool, learner, inferencer = _objects(processes, threads, env)
    batch, steps = _Unrolls(agent, pool, inferencer).next()
    return lambda: float(learner.step(batch)["loss"]), steps


def _loop(processes: int, threads: int, env: str) -> tuple[Callable[[], Any], int]:
    """Run all three parts in sequence, like a program without communication and waiting."""
    agent, pool, learner, inferencer = _objects(processes, threads, env)
    unrolls = _Unrolls(agent, pool, inferencer)

    def turn() -> None:
        batch, _ = unrolls.next()
        float(learner.step(batch)["loss"])

    return turn, agent.cfg.batch_size * agent.cfg.unroll_length


PARTS = {"env": _env, "inference": _inference, "learner": _learner, "loop": _loop}


class _Unrolls:
    """Acts and stores unrolls in plain arrays: at least one unroll per environment, and at least one batch."""

    def __init__(self, agent: Any, pool: Any, inferencer: Any) -> None:
        self._pool, self._inferencer = pool, inferencer
        self._length, self._batch_size = agent.cfg.unroll_length, agent.cfg.batch_size
        self._env_ids, self._timestep = np.arange(pool.num_envs), pool.reset()
        self._count = max(self._batch_size, pool.num_envs)
        if self._count % self._batch_size or self._count % pool.num_envs:
            raise ValueError(f"{self._batch_size} unrolls and {pool.num_envs} environments: one must divide the other.")
        self._used = self._count
        shape, length = (self._count, self._length), self._length
        observation = agent.step_spec.observation
        self._observation = np.empty((self._count, length + 1, *observation.shape), observation.dtype)
        self._step_type = np.empty((self._count, length + 1), np.uint8)
        self._action = np.empty(shape, agent.step_spec.action.dtype)
        self._reward, self._discount, self._log_prob = (np.empty(shape, np.float32) for _ in range(3))

    def next(self) -> tuple[Any, int]:
        """Return (a batch, its number of environment steps)."""
        from rlframe.types import Batch, SequenceBatch

        if self._used == self._count:
            for first in range(0, self._count, len(self._env_ids)):
                self._act(slice(first, first + len(self._env_ids)))
            self._used = 0
        rows = slice(self._used, self._used + self._batch_size)
        self._used += self._batch_size
        data = SequenceBatch(
            observation=self._observation[rows],
            step_type=self._step_type[rows],
            action=self._action[rows],
            reward=self._reward[rows],
            discount=self._discount[rows],
            extras={"log_prob": self._log_prob[rows]},
            agent_state=(),
        )
        ones = np.ones(self._batch_size)
        batch = Batch(data, np.zeros((len(ones), 3), np.int64), ones.astype(np.float32), ones.astype(np.int64))
        return batch, self._batch_size * self._length

    def _act(self, rows: slice) -> None:
        for t in range(self._length + 1):
            timestep = self._timestep
            self._observation[rows, t], self._step_type[rows, t] = timestep.observation, timestep.step_type
            if t == self._length:
                return
            output, _ = self._inferencer.inference(self._env_ids, timestep, ())
            self._timestep = after = self._pool.step(output.action)
            self._action[rows, t], self._log_prob[rows, t] = output.action, output.extras["log_prob"]
            self._reward[rows, t], self._discount[rows, t] = after.reward, after.discount


if __name__ == "__main__":
    main()
