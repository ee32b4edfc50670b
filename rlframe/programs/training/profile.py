"""The profile of a run in one process: a table with the time of each part, and options that may make the run faster."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from rlframe.envs.jax_envs import jax_tasks
from rlframe.envs.names import default_type, split
from rlframe.errors import UsageError
from rlframe.interprocess.files import NativePath
from rlframe.metrics.terminal import console, table
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.make_experiment import change_options
from rlframe.programs.topologies.config import EnvOptions
from rlframe.programs.topologies.makers import check_supports_async, env_pool_type
from rlframe.types import ReplaySpec

# Names of the parts in the table.
ENVIRONMENT, INFERENCE, ADD, SAMPLE, LEARNER = "environment", "inference", "replay add", "replay sample", "learner"
COMPILATION, LOOP = "compilation (first calls)", "rlframe (loop, actor, logs)"


class ProfileRow(NamedTuple):
    """A row of the profile's table: the calls and the time of one part of the run."""

    name: str
    calls: int
    seconds: float
    microseconds_per_call: float
    share: float  # share of the total time, 0 to 1


class Profile:
    """A profile of a run: the time of calls of the environments, the inferencer, the replay buffer and the learner.

    While the profile measures, each learner step waits until its update is complete. The first call of the inferencer
    and of the learner compiles a function, so its time is a separate row of the table.

    Args:
        traces: Also write a JAX trace, for TensorBoard or Perfetto.

    Attributes:
        spec: Spec of the replay of the run. None before the measurement.
    """

    spec: ReplaySpec | None = None

    def __init__(self, traces: bool = False) -> None:
        self._traces = traces
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._compiling = 0.0
        self._total = 0.0

    @contextlib.contextmanager
    def measure(self, driver: Any, trace_dir: pathlib.Path) -> Iterator[None]:
        """Measure the time of an `InlineDriver`'s calls until the context ends. `trace_dir` is for a JAX trace."""
        env, self.spec = driver.pool, driver.spec
        self._time_calls(env, "step" if env.is_sync else "recv", ENVIRONMENT)
        if not env.is_sync:
            self._time_calls(env, "send", ENVIRONMENT)
        self._time_calls(driver.inferencer, "inference", INFERENCE)
        self._time_calls(driver.replay_buffer, "add", ADD)
        self._time_calls(driver.replay_buffer, "sample", SAMPLE)
        self._time_calls(driver.learner, "step", LEARNER, wait=True)
        began, native = time.perf_counter(), None
        if self._traces:
            trace_dir.mkdir(parents=True, exist_ok=True)
            native = NativePath(os.fspath(trace_dir))
            jax.profiler.start_trace(native.path)
        try:
            yield
        finally:
            if native is not None:
                jax.profiler.stop_trace()
                native.close()
            self._total = time.perf_counter() - began

    def rows(self) -> list[ProfileRow]:
        """Return the rows of the table, largest time first. The row `rlframe` has the time of all other parts."""
        seconds_of = {**self._seconds, COMPILATION: self._compiling}
        seconds_of[LOOP] = max(0.0, self._total - sum(seconds_of.values()))
        calls = {**self._calls, COMPILATION: len(self._calls)}
        calls[LOOP] = self._calls.get(INFERENCE, 0)
        return [
            ProfileRow(
                name, calls[name], seconds, 1e6 * seconds / max(calls[name], 1), seconds / max(self._total, 1e-9)
            )
            for name, seconds in sorted(seconds_of.items(), key=lambda row: -row[1])
        ]

    def print(self, advice: Iterable[str] = ()) -> None:
        """Print the table and lines of advice to stderr."""
        rows = [
            (
                row.name,
                f"{row.calls:,}",
                f"{row.seconds:.2f}",
                f"{row.microseconds_per_call:.0f}",
                f"{row.share:.1%}",
            )
            for row in self.rows()
        ]
        columns = ("part", "calls", "seconds", "us per call", "share")
        console(sys.stderr).print(table(columns, rows, title="time of each part", right=True))
        for line in advice:
            print(line, file=sys.stderr)

    def _time_calls(self, owner: Any, method: str, name: str, wait: bool = False) -> None:
        function: Callable[..., Any] = getattr(owner, method)
        self._seconds.setdefault(name, 0.0)
        self._calls.setdefault(name, 0)
        first = True

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if wait:
                jax.block_until_ready(result)
            seconds = time.perf_counter() - start
            if first and name in (INFERENCE, LEARNER):
                self._compiling += seconds
                first = False
            else:
                self._seconds[name] += seconds
                self._calls[name] += 1
            return result

        setattr(owner, method, timed)


_LARGE = 0.3  # share of the time from which a part gets advice
_MICROSECONDS_FOR_WORKERS = 100.0  # a faster step loses more time by waking workers than it gains


class Change(NamedTuple):
    """Options to try, and the reason."""

    options: dict[str, Any]
    reason: str

    def __str__(self) -> str:
        flags = []
        for name, value in self.options.items():
            flag = "--" + {"async_envs": "async"}.get(name, name).replace("_", "-")
            flags.append(flag if value is True else f"{flag} {value}")
        return f"try {' '.join(flags)}: {self.reason}"


class Run(NamedTuple):
    """The profiled run."""

    experiment: Experiment
    spec: ReplaySpec
    microseconds: float  # time of a step of one environment
    shares: dict[str, float]  # part -> share of the time without compilation
    cores: int


def advise(rows: Sequence[ProfileRow], experiment: Experiment, spec: ReplaySpec) -> list[str]:
    """Return advice, one line for each large part of the run. Each line has options that this run would accept.

    Args:
        rows: rows of the profile.
        experiment: the experiment of the run.
        spec: the replay of its agent.
    """
    seconds = {row.name: row.seconds for row in rows}
    compiling = seconds.pop(COMPILATION)
    total = max(sum(seconds.values()), 1e-9)
    shares = {name: value / total for name, value in seconds.items()}
    step = next(row for row in rows if row.name == ENVIRONMENT).microseconds_per_call / experiment.num_awaited_envs
    run = Run(experiment, spec, step, shares, len(os.sched_getaffinity(0)))
    lines = []
    if compiling > total:
        lines.append(f"compilation {compiling / (compiling + total):.0%}: it runs only once, so profile more steps")
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        change = next((change for change in _RULES[name](run) if _is_accepted(experiment, change.options)), None)
        if share >= _LARGE and change is not None:
            lines.append(f"{name} {share:.0%}: {change}")
    return lines


def _is_accepted(experiment: Experiment, options: dict[str, Any]) -> bool:
    try:
        change_options(experiment, options)
    except UsageError:
        return False
    return True


# Each rule yields changes, best first. The first one that the run accepts becomes the advice.


def _environment(run: Run) -> Iterator[Change]:
    experiment, config = run.experiment, EnvOptions.of(run.experiment)
    env = registry.env_name_or_builder(experiment.env)
    kind, task = env_pool_type(experiment, experiment.envs_per_pool, env), split(experiment.env)[1]
    most = min(run.cores, experiment.num_envs)
    workers = config.num_workers or most
    if kind == "jax":
        yield Change({"topology": "fused"}, "it compiles environment, agent and updates into one call")
    elif kind in ("thread", "process") and workers < most:
        yield Change({"num_workers": most}, f"{workers} of {run.cores} cores step environments")
    if kind not in ("jax", "envpool") and default_type(env, experiment.envs_per_pool) == "envpool":
        yield Change({"env_type": "envpool"}, "EnvPool has this task in C++")
    if kind == "loop" and most > 1 and run.microseconds >= _MICROSECONDS_FOR_WORKERS:
        change = {"env_type": "process", "num_workers": most}
        yield Change(change, f"a step takes {run.microseconds:,.0f} us, and a loop uses one core")
    if kind != "jax" and isinstance(env, str) and task in jax_tasks():
        yield Change(
            {"env": f"jax:{task}", "env_type": "auto", "topology": "fused"}, "the same task in one compiled loop"
        )
    if kind in ("thread", "process", "envpool") and not config.async_envs and _can_be_async(run):
        yield Change({"async_envs": True}, "the agent acts in the environments that answer first")


def _can_be_async(run: Run) -> bool:
    try:
        check_supports_async(run.experiment.agent, run.spec)
    except UsageError:
        return False
    return True


def _learner(run: Run) -> Iterator[Change]:
    config = run.experiment.agent_config
    acting = run.shares[ENVIRONMENT] + run.shares[INFERENCE]
    if run.cores > 2 and acting >= _LARGE and run.spec.max_staleness != 0:  # on-policy actors wait for each update
        yield Change({"topology": "heavy_env"}, "its processes act while the learner learns")
    epochs, period = getattr(config, "num_epochs", 1), getattr(config, "update_period", None)
    minibatches = getattr(config, "num_minibatches", 1)
    if minibatches >= 8:
        yield Change({"num_minibatches": minibatches // 2}, "fewer, larger minibatches take less time")
    if epochs > 1:
        yield Change({"num_epochs": epochs // 2}, "fewer passes over each batch, but the agent learns less from it")
    if period is not None:
        yield Change({"update_period": 2 * period}, "fewer updates per step, but the agent learns less from each step")


def _inference(run: Run) -> Iterator[Change]:
    yield Change({"num_envs": 2 * run.experiment.num_envs}, "each call of the network acts for all environments")


def _sample(run: Run) -> Iterator[Change]:
    size = run.spec.batch_size
    if run.spec.kind != "queue" and size is not None and size > 1:
        yield Change({"batch_size": size // 2}, "smaller batches are copied faster")


def _loop(run: Run) -> Iterator[Change]:
    yield Change({"num_envs": 2 * run.experiment.num_envs}, "the work of each loop is shared by all environments")


def _nothing(run: Run) -> Iterator[Change]:
    return iter(())


_RULES: dict[str, Callable[[Run], Iterator[Change]]] = {
    ENVIRONMENT: _environment,
    INFERENCE: _inference,
    ADD: _nothing,
    SAMPLE: _sample,
    LEARNER: _learner,
    LOOP: _loop,
}
