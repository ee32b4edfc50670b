"""Time profile of an Actor's step, and the framework's tax: the time of a step beyond its bare parts.

The bare parts are EnvPool's own send and receive, the agent's jitted call with a numpy result, and a copy of the step's
arrays into a preallocated ring. They are measured in alternating turns with the Actor. A turn is a few dozen steps.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from benchmarks.context import Context
from benchmarks.processor import Stopwatch
from benchmarks.report import Row, Table
from rlframe.engines import EngineOptions
from rlframe.programs import make_experiment
from rlframe.programs.topologies.single_process import single_process

if TYPE_CHECKING:
    from rlframe.programs.training.driver import InlineDriver

TAX = 30.0  # microseconds per batch
TURN = 32  # steps
PARTS = ("environment", "inference", "replay add")


class Workload(NamedTuple):
    """One row of the benchmark."""

    title: str
    agent: str
    env: str
    num_envs: int
    turns: int


WORKLOADS = (
    Workload("PPO, CartPole-v1, 8 environments", "ppo", "CartPole-v1", 8, 60),
    Workload("PPO, CartPole-v1, 64 environments", "ppo", "CartPole-v1", 64, 60),
    Workload("DQN, CartPole-v1, 8 environments", "dqn", "CartPole-v1", 8, 60),
    Workload("PPO, Pong-v5 with the Nature CNN, 8 environments", "ppo", "Pong-v5", 8, 8),
)


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    tables = []
    for workload in WORKLOADS:
        log(workload.title)
        tables.append(_measure(workload, max(2, workload.turns // 8) if context.quick else workload.turns))
    return tables


def _measure(workload: Workload, turns: int) -> Table:
    described = make_experiment(workload.agent, workload.env, num_envs=workload.num_envs, env_type="envpool")
    loop = _loop(described)
    try:
        clocks = {name: Clock() for name in ("step", *PARTS)}
        _attach(loop, clocks)
        bare = _bare_parts(loop, described)
        bare_clocks = {name: Clock() for name in bare}
        spent, bare_spent = [], []
        for turn in range(turns + 2):
            if turn == 2:  # the first two turns compile and warm up
                for clock in (*clocks.values(), *bare_clocks.values()):
                    clock.times.clear()
            watch = Stopwatch()
            for _ in range(TURN):
                with clocks["step"]:
                    loop.actor.step()
            spent.append(watch.processor_us(TURN))
            watch = Stopwatch()
            for _ in range(TURN):
                for name, call in bare.items():  # in the order of an Actor, so that caches are equally cold
                    with bare_clocks[name]:
                        call()
            bare_spent.append(watch.processor_us(TURN))
            loop.replay_buffer.sample()  # keeps the queue empty
    finally:
        loop.close()
    return _table(
        workload.title,
        {name: clock.median() for name, clock in clocks.items()},
        {name: clock.median() for name, clock in bare_clocks.items()},
        (float(np.median(spent[2:])), float(np.median(bare_spent[2:]))),
    )


def _loop(experiment: Any) -> InlineDriver:
    """Build the objects of a single-process run, with a run directory that nothing is written to."""
    engine = _topology_config(experiment).engine_class(EngineOptions())
    path = pathlib.Path(tempfile.mkdtemp())
    session = _session_class()(experiment, _make_agent(experiment), path, until=experiment.steps, began=0.0)
    single_process(engine, session)
    loop = engine.handle_of("train")
    return getattr(loop, "driver", loop)  # with `--against`, an older checkout may have no driver


# With `--against`, this file also measures checkouts in which the objects of the next four functions have other names.


def _topology_config(experiment: Any) -> Any:
    return experiment.topology_config if hasattr(experiment, "topology_config") else experiment.topology


def _make_agent(experiment: Any) -> Any:
    from rlframe.programs import topologies

    file = "makers" if importlib.util.find_spec(f"{topologies.__name__}.makers") else "parts"
    return importlib.import_module(f"{topologies.__name__}.{file}").make_agent(experiment)


def _session_class() -> Any:
    from rlframe.programs import session

    return session.Session if hasattr(session, "Session") else importlib.import_module("rlframe.programs.run").Run


def _jitted_call(inferencer: Any, timestep: Any, state: Any) -> Callable[[], Any]:
    """Return a function that makes the jitted call of an Inferencer, without the Inferencer. Older versions differ."""
    call = np.uint32(1)
    if hasattr(inferencer, "_policy"):
        policy = inferencer._policy
        rng, (_, params), request = policy.rng, policy.active, (call, timestep, state)
        return lambda: policy.step(rng, params, request)
    act, rng, (_, params) = inferencer._jitted_step, inferencer._rng, inferencer._active_params
    if hasattr(inferencer, "_request"):
        return lambda: act(rng, params, (call, timestep, state))
    return lambda: act(rng, call, params, timestep, state)


def _table(title: str, ours: dict[str, float], bare: dict[str, float], spent: tuple[float, float]) -> Table:
    own = ours["step"] - sum(ours[name] for name in PARTS)
    tax = ours["step"] - sum(bare.values())
    rows = [Row("the whole step", ours["step"], processor=spent[0])]
    rows += [Row(f"  {name}", ours[name], note=f"bare: {bare[name]:.1f}") for name in PARTS]
    rows.append(Row("  the Actor itself", own))
    ours_row = Row("the framework's tax", tax, TAX, "the step minus its bare parts", spent[0] - spent[1])
    return Table(f"An Actor's step: {title}", "µs, medians", ours_row, tuple(rows), False, ratios=False)


class Clock:
    """A context manager that records the duration of its blocks, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.times.append(time.perf_counter() - self._start)

    def median(self) -> float:
        """Return the median in microseconds."""
        return float(np.median(self.times)) * 1e6


def _attach(loop: InlineDriver, clocks: dict[str, Clock]) -> None:
    """Time each call of the Actor with a clock."""
    for owner, method, name in (
        (loop.pool, "step", "environment"),
        (loop.inferencer, "inference", "inference"),
        (loop.replay_buffer, "add", "replay add"),
    ):
        setattr(owner, method, _timed(getattr(owner, method), clocks[name]))


def _timed(function: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        clock.times.append(time.perf_counter() - start)
        return result

    return timed


def _bare_parts(loop: InlineDriver, described: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that do the work of a step without any code of rlframe around it."""
    seen: list[Any] = []
    add = loop.replay_buffer.add
    loop.replay_buffer.add = lambda env_ids, step: (seen.append(step), add(env_ids, step))
    loop.actor.step()
    loop.replay_buffer.add = add
    step = seen[0]

    arrays = [leaf for leaf in jax.tree.leaves(step._replace(next_timestep=())) if isinstance(leaf, np.ndarray)]
    ring = [np.zeros((256, *array.shape), array.dtype) for array in arrays]
    row = 0

    def copy() -> None:
        nonlocal row
        row = (row + 1) % 256
        for kept, array in zip(ring, arrays, strict=True):
            kept[row] = array

    # The function that the Inferencer calls, without the Inferencer.
    act = _jitted_call(loop.inferencer, step.timestep, step.agent_state)

    def infer() -> np.ndarray:
        return np.asarray(act()[0])

    return {"inference": infer, "environment": _bare_env(described, step.agent_output.action), "replay add": copy}


def _bare_env(described: Any, action: np.ndarray) -> Callable[[], Any]:
    """Return a function that steps EnvPool's C++ object without EnvPool's own Python layer."""
    from rlframe.envs.envpool import EnvPoolAdapter

    pool = EnvPoolAdapter(
        described.env, described.num_envs, None, 1, _topology_config(described).num_workers, described.env_kwargs
    )
    pool.reset()
    raw, ids = pool.pool, np.arange(described.num_envs, dtype=np.int32)
    action = np.ascontiguousarray(action, pool.codec.action.dtype)

    def step() -> None:
        raw._send([ids, ids, action])
        raw._recv()

    return step
