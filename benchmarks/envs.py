"""How fast the environment pools are, against peers and against what the machine allows, in one run.

    rlframe bench envs

Ratios are of medians over interleaved repeats, so that a noisy neighbor slows all rows alike.
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
from benchmarks.report import Row, Table, middle, processor
from rlframe.envs import AsyncEnv, SyncEnv

WORKERS = 2
Rate = dict[str, float]  # as a Stopwatch gives it
Contender = tuple[str, Callable[[float], Rate]]  # (name, seconds -> steps per second)

OURS = ("SyncEnv", "AsyncEnv")  # the names of our rows begin so
ALONE = "two processes that do not communicate"
PROCESSES = "SyncEnv process"
GYMNASIUM = "gymnasium AsyncVectorEnv"
CHOSEN = "SyncEnv envpool, as it chooses"


class Wanted(NamedTuple):
    """Which row is ours, and what is asked of it."""

    of: str
    ratios: dict[str, float]  # the least multiple of these rows
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
    """Gives the same observation at each step, in no time: what a step takes is the pool's own."""

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
    """Keeps a core busy for so many milliseconds of wall time a step, as a Python simulator does."""

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


def count(step: Callable[[], Any], steps_per_call: int, seconds: float) -> Rate:
    """Steps per second of `step` over about `seconds`, after a warm-up, and processor time of a step."""
    for _ in range(3):
        step()
    calls, watch = 0, Stopwatch()
    while watch.seconds < seconds:
        step()
        calls += 1
    return watch.rate(calls * steps_per_call)


def ours(make: Callable[[], Any], seconds: float) -> Rate:
    """A SyncEnv or AsyncEnv under constant actions."""
    with make() as pool:
        batch = pool.num_envs if pool.is_sync else pool.wait_num
        actions = np.zeros((batch, *pool.action_spec.shape), pool.action_spec.dtype)
        if pool.is_sync:
            pool.reset()
            return count(lambda: pool.step(actions), batch, seconds)

        def turn() -> None:
            env_ids, _ = pool.recv()
            pool.send(env_ids, actions)

        return count(turn, batch, seconds)


def gymnasium_async(make: Callable[[], gymnasium.Env], size: int, seconds: float) -> Rate:
    """gymnasium's own process pool: one process for each environment, shared memory for observations."""
    pool = gymnasium.vector.AsyncVectorEnv([make] * size)
    try:
        pool.reset(seed=0)
        actions = np.zeros(size, np.int64)
        return count(lambda: pool.step(actions), size, seconds)
    finally:
        pool.close()


def sb3_subproc(make: Callable[[], gymnasium.Env], size: int, seconds: float) -> Rate:
    """Stable-Baselines3's process pool, where it is installed."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    pool = SubprocVecEnv([make] * size)
    try:
        pool.reset()
        actions = np.zeros(size, np.int64)
        return count(lambda: pool.step(actions), size, seconds)
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
    results.put(count(turn, size, seconds)["steps_per_second"])


def no_communication(make: Callable[[], gymnasium.Env], size: int, seconds: float) -> Rate:
    """The limit: as many processes as workers, each stepping its share in a loop and telling nobody."""
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
    """The process pools against each other and against processes that do not communicate."""
    rows: list[Contender] = [
        (ALONE, lambda s: no_communication(make, size, s)),
        (PROCESSES, lambda s: ours(lambda: SyncEnv(name, size, "process", num_workers=WORKERS, **options), s)),
        (
            "AsyncEnv process, half of them",
            lambda s: ours(lambda: AsyncEnv(name, size, size // 2, "process", num_workers=WORKERS, **options), s),
        ),
        (GYMNASIUM, lambda s: gymnasium_async(make, size, s)),
    ]
    with contextlib.suppress(ImportError):
        import stable_baselines3  # noqa: F401

        rows.append(("Stable-Baselines3 SubprocVecEnv", lambda s: sb3_subproc(make, size, s)))
    return rows


def space_rows(size: int) -> list[Contender]:
    """The pool that steps environments in a loop, by what they observe."""

    def row(name: str, space: gymnasium.Space) -> Contender:
        return f"SyncEnv loop, {name}", lambda seconds: ours(lambda: SyncEnv(lambda: IdleEnv(space), size), seconds)

    return [row(name, space) for name, space in SPACES.items()]


def envpool_rows(task: str, size: int, threads: int) -> list[Contender]:
    """EnvPool itself and under SyncEnv."""

    def bare(seconds: float) -> Rate:
        with contextlib.redirect_stderr(io.StringIO()):
            import envpool
        pool = envpool.make_gymnasium(task, num_envs=size, num_threads=threads)
        pool.reset()
        actions = np.zeros((size, *pool.action_space.shape), pool.action_space.dtype)
        return count(lambda: pool.step(actions), size, seconds)

    def pool(num_workers: int | None) -> Callable[[float], Rate]:
        return lambda seconds: ours(lambda: SyncEnv(task, size, "envpool", num_workers=num_workers), seconds)

    return [
        (f"EnvPool, {threads} threads", bare),
        (f"SyncEnv envpool, {threads} threads", pool(threads)),
        (CHOSEN, pool(None)),
    ]


def table(title: str, rows: list[Contender], context: Context, say: Callable[[str], None], wanted: Wanted) -> Table:
    """Steps per second of each row, in turns; `wanted` names what is ours and how much is asked of it."""
    say(f"envs: {title}")
    rows = [row for row in rows if row[0].startswith(OURS) or not context.only_ours]
    rates: dict[str, list[Rate]] = {name: [] for name, _ in rows}
    for _ in range(context.repeats):
        for name, rate in rows:
            rates[name].append(rate(0.5 if context.quick else 3.0))

    def row(name: str, limit: float | None) -> Row:
        spent = processor(rates[name]) if name.startswith(OURS) else None
        return Row(name, middle(rate["steps_per_second"] for rate in rates[name]), limit, processor=spent)

    others = [row(name, wanted.ratios.get(name)) for name in rates if name != wanted.of]
    return Table(title, "steps/s", row(wanted.of, wanted.least), tuple(others))


def run(context: Context, say: Callable[[str], None] = print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    warnings.simplefilter("ignore")
    processes = Wanted(PROCESSES, {ALONE: 0.4, GYMNASIUM: 8.0})
    rows = process_rows(cart_pole, 64, "gymnasium:CartPole-v1")
    tables = [table("CartPole, 64 environments, 2 workers", rows, context, say, processes)]
    for milliseconds, make in ((1, busy_1ms), (5, busy_5ms)):
        ideal = WORKERS * 1000.0 / milliseconds
        title = f"A Python environment of {milliseconds} ms, 8 of them; ideal {ideal:,.0f}"
        wanted = Wanted(PROCESSES, {}, 0.95 * ideal if milliseconds == 5 else None)
        tables.append(table(title, process_rows(make, 8, make), context, say, wanted))
    for size in (1, 8, 64):
        wanted = Wanted("SyncEnv loop, Box float32", {})
        title = f"An environment whose step takes no time, {size} of them, by its observation space"
        tables.append(table(title, space_rows(size), context, say, wanted))
    for task, size in (("CartPole-v1", 8), ("CartPole-v1", 64), ("HalfCheetah-v4", 8), ("Pong-v5", 8)):
        rows = [*envpool_rows(task, size, 1), *envpool_rows(task, size, 2)]
        tables.append(table(f"EnvPool {task}, {size} environments", rows, context, say, Wanted(CHOSEN, {})))
    return tables
