"""Speed of the environment pools, compared with peers and with the limit of the machine, in one run.

    rlframe bench envs

Ratios use medians over interleaved repeats, so that other work on the machine affects all rows.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from benchmarks.context import Context
from benchmarks.processor import Stopwatch
from benchmarks.report import Row, Table, median, processor
from rlframe.envs import AsyncEnv, SyncEnv

WORKERS = 2
Rate = dict[str, float]  # as returned by a Stopwatch
Contender = tuple[str, Callable[[float], Rate]]  # (name, function that measures for the given seconds)

OURS = ("SyncEnv", "AsyncEnv")  # prefixes of the names of our rows
ALONE = "two processes that do not communicate"
PROCESSES = "SyncEnv process"
GYMNASIUM = "gymnasium AsyncVectorEnv"
CHOSEN = "SyncEnv envpool, as it chooses"


class RowTarget(NamedTuple):
    """The name of our row, and its targets."""

    of: str
    ratios: dict[str, float]  # row -> minimum multiple of this row
    least: float | None = None  # steps per second


_BOX, _CATEGORIES = gymnasium.spaces.Box, gymnasium.spaces.Discrete(5)
SPACES: dict[str, gymnasium.Space] = {
    "Box float32": _BOX(-1, 1, (17,), np.float32),
    "Box float64": _BOX(-1, 1, (17,), np.float64),
    "Box int64": _BOX(0, 9, (17,), np.int64),
    "Discrete": _CATEGORIES,
    "MultiDiscrete": gymnasium.spaces.MultiDiscrete([3, 4, 5]),
    "Dict": gymnasium.spaces.Dict(place=_BOX(-1, 1, (4,), np.float64), kind=_CATEGORIES),
}


class IdleEnv(gymnasium.Env):
    """An environment whose step takes no time, so that only the overhead of the pool is measured."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, space: gymnasium.Space):
        self.observation_space = space
        space.seed(0)
        self.observation = space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation, {}

    def step(self, action: Any) -> Any:
        return self.observation, 0.0, False, False, {}


class BusyEnv(gymnasium.Env):
    """An environment whose step uses a core for the given milliseconds of wall time, like a Python simulator."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, milliseconds: float):
        self.seconds = milliseconds / 1000.0
        self.observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action: Any) -> Any:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return self.observation, 0.0, False, False, {}


def step_rate(step: Callable[[], Any], steps_per_call: int, seconds: float) -> Rate:
    """Return steps per second of `step` during about `seconds`, after a warm-up, and processor time per step."""
    for _ in range(3):
        step()
    calls, watch = 0, Stopwatch()
    while watch.seconds < seconds:
        step()
        calls += 1
    return watch.rate(calls * steps_per_call)


def pool_rate(make: Callable[[], Any], seconds: float) -> Rate:
    """Measure a SyncEnv or AsyncEnv with constant actions."""
    with make() as pool:
        batch = pool.num_envs if pool.is_sync else pool.wait_num
        actions = np.zeros((batch, *pool.action_spec.shape), pool.action_spec.dtype)
        if pool.is_sync:
            pool.reset()
            return step_rate(lambda: pool.step(actions), batch, seconds)

        def turn() -> None:
            env_ids, _ = pool.recv()
            pool.send(env_ids, actions)

        return step_rate(turn, batch, seconds)


def gymnasium_async(make: Callable[[], gymnasium.Env], size: int, seconds: float) -> Rate:
    """Measure gymnasium's process pool: one process per environment, shared memory for observations."""
    pool = gymnasium.vector.AsyncVectorEnv([make] * size)
    try:
        pool.reset(seed=0)
        actions = np.zeros(size, np.int64)
        return step_rate(lambda: pool.step(actions), size, seconds)
    finally:
        pool.close()


def sb3_subproc(make: Callable[[], gymnasium.Env], size: int, seconds: float) -> Rate:
    """Measure Stable-Baselines3's process pool, if it is installed."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    pool = SubprocVecEnv([make] * size)
    try:
        pool.reset()
        actions = np.zeros(size, np.int64)
        return step_rate(lambda: pool.step(actions), size, seconds)
    finally:
        pool.close()


def _alone(make: Callable[[], gymnasium.Env], size: int, seconds: float, barrier: Any, results: Any) -> None:
    envs = [make() for _ in range(size)]
    for i, env in enumerate(envs):
        env.reset(seed=i)
    actions = np.zeros(size, np.int64)

    def turn() -> None:
        for env, action in zip(envs, actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    barrier.wait()
    results.put(step_rate(turn, size, seconds)["steps_per_second"])


def no_communication(make: Callable[[], gymnasium.Env], size: int, seconds: float) -> Rate:
    """Measure the limit: each worker process steps its environments in a loop without communication."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(WORKERS), context.Queue()
    arguments = (make, size // WORKERS, seconds, barrier, results)
    processes = [context.Process(target=_alone, args=arguments) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    total = sum(results.get() for _ in processes)
    for process in processes:
        process.join()
    return {"steps_per_second": total}


def cart_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def busy_1ms() -> gymnasium.Env:
    return BusyEnv(1.0)


def busy_5ms() -> gymnasium.Env:
    return BusyEnv(5.0)


def process_rows(make: Callable[[], gymnasium.Env], size: int, name: Any, **options: Any) -> list[Contender]:
    """Return rows for the process pools, and for processes that do not communicate."""
    rows: list[Contender] = [
        (ALONE, lambda s: no_communication(make, size, s)),
        (PROCESSES, lambda s: pool_rate(lambda: SyncEnv(name, size, "process", num_workers=WORKERS, **options), s)),
        (
            "AsyncEnv process, half of them",
            lambda s: pool_rate(lambda: AsyncEnv(name, size, size // 2, "process", num_workers=WORKERS, **options), s),
        ),
        (GYMNASIUM, lambda s: gymnasium_async(make, size, s)),
    ]
    with contextlib.suppress(ImportError):
        import stable_baselines3  # noqa: F401

        rows.append(("Stable-Baselines3 SubprocVecEnv", lambda s: sb3_subproc(make, size, s)))
    return rows


def space_rows(size: int) -> list[Contender]:
    """Return rows for the loop pool, one for each kind of observation."""

    def row(name: str, space: gymnasium.Space) -> Contender:
        return f"SyncEnv loop, {name}", lambda s: pool_rate(lambda: SyncEnv(lambda: IdleEnv(space), size), s)

    return [row(name, space) for name, space in SPACES.items()]


def envpool_rows(task: str, size: int, threads: int) -> list[Contender]:
    """Return rows for EnvPool alone and in SyncEnv."""

    def bare(seconds: float) -> Rate:
        with contextlib.redirect_stderr(io.StringIO()):
            import envpool
        pool = envpool.make_gymnasium(task, num_envs=size, num_threads=threads)
        pool.reset()
        actions = np.zeros((size, *pool.action_space.shape), pool.action_space.dtype)
        return step_rate(lambda: pool.step(actions), size, seconds)

    def pool(num_workers: int | None) -> Callable[[float], Rate]:
        return lambda seconds: pool_rate(lambda: SyncEnv(task, size, "envpool", num_workers=num_workers), seconds)

    return [
        (f"EnvPool, {threads} threads", bare),
        (f"SyncEnv envpool, {threads} threads", pool(threads)),
        (CHOSEN, pool(None)),
    ]


def table(title: str, rows: list[Contender], context: Context, log: Callable[[str], None], target: RowTarget) -> Table:
    """Measure steps per second of each row in alternating turns. `target` defines our row and its targets."""
    log(f"envs: {title}")
    rows = [row for row in rows if row[0].startswith(OURS) or not context.only_ours]
    rates: dict[str, list[Rate]] = {name: [] for name, _ in rows}
    for _ in range(context.repeats):
        for name, rate in rows:
            rates[name].append(rate(0.5 if context.quick else 3.0))

    def row(name: str, limit: float | None) -> Row:
        spent = processor(rates[name]) if name.startswith(OURS) else None
        return Row(name, median(rate["steps_per_second"] for rate in rates[name]), limit, processor=spent)

    others = [row(name, target.ratios.get(name)) for name in rates if name != target.of]
    return Table(title, "steps/s", row(target.of, target.least), tuple(others))


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    warnings.simplefilter("ignore")
    processes = RowTarget(PROCESSES, {ALONE: 0.4, GYMNASIUM: 8.0})
    rows = process_rows(cart_pole, 64, "gymnasium:CartPole-v1")
    tables = [table("CartPole, 64 environments, 2 workers", rows, context, log, processes)]
    for milliseconds, make in ((1, busy_1ms), (5, busy_5ms)):
        ideal = WORKERS * 1000.0 / milliseconds
        title = f"A Python environment of {milliseconds} ms, 8 of them; ideal {ideal:,.0f}"
        target = RowTarget(PROCESSES, {}, 0.95 * ideal if milliseconds == 5 else None)
        tables.append(table(title, process_rows(make, 8, make), context, log, target))
    for size in (1, 8, 64):
        target = RowTarget("SyncEnv loop, Box float32", {})
        title = f"An environment whose step takes no time, {size} of them, by its observation space"
        tables.append(table(title, space_rows(size), context, log, target))
    for task, size in (("CartPole-v1", 8), ("CartPole-v1", 64), ("HalfCheetah-v4", 8), ("Pong-v5", 8)):
        rows = [*envpool_rows(task, size, 1), *envpool_rows(task, size, 2)]
        tables.append(table(f"EnvPool {task}, {size} environments", rows, context, log, RowTarget(CHOSEN, {})))
    return tables
