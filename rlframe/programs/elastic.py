"""The topology elastic: a coordinator's job, whose workers come and go while it runs.

The coordinator is the program's one node. Its workers are processes that it has spawned, but that outlive it; the
memory of replay and parameters is the launcher's, which nothing that may be killed holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import time
from typing import Any

from rlframe.actors import Actor
from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.config import CoordinatorConfig, Limits
from rlframe.coordinator.coordinator import Coordinator
from rlframe.coordinator.operators.local import LocalOperator
from rlframe.coordinator.param_store_shared import SharedParamStore
from rlframe.coordinator.workers.collector import CollectorWorker
from rlframe.coordinator.workers.learner import LearnerWorker
from rlframe.coordinator.workers.process import SILENCE
from rlframe.coordinator.workers.records import save_workers
from rlframe.engines.launching.launcher import ON_CPU
from rlframe.interprocess.processes import ProcessId, this_process
from rlframe.programs.assemble import Evaluations, make_pool, replay_capacity
from rlframe.programs.census import Census
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir import Result, RunDir
from rlframe.programs.topologies import Run, add_reverb, learner_config
from rlframe.replay import SharedMemReplayBuffer

POLICY = "main"


def elastic(engine: Any, run: Run) -> None:
    """A coordinator, which has collectors come and go as the learner needs them."""
    replay_buffer = add_replay(engine, run)
    param_store = engine.own(SharedParamStore.of(run.agent, (POLICY,)))
    accelerators = {name: os.environ.get(name) for name in ON_CPU}  # of the learner, as this process would have them
    engine.add("coordinator", make_coordinator, run, replay_buffer, param_store, this_process(), accelerators)


def add_replay(engine: Any, run: Run) -> Any:
    """The replay that the experiment asks for: an object that finds it from any process of the run."""
    described, agent, most = run.described, run.agent, run.described.max_actors
    # Each collector keeps its share of the steps as if there were num_actors of them: few keep as many as they do in
    # another topology, and many keep more.
    capacity = replay_capacity(agent.replay_spec, described) * most // described.num_actors
    if described.replay_kind == "reverb":
        from rlframe.replay.reverb import ReverbReplayBuffer

        add_reverb(engine, run, capacity)
        return ReverbReplayBuffer(agent, engine.address_of("replay"))
    return engine.own(
        SharedMemReplayBuffer(
            agent,
            num_writers=most,
            seed=described.seed,
            max_envs=described.envs_per_actor,
            timeout=float("inf"),  # a pause takes as long as it takes; a learner that hangs is the coordinator's to see
            run_ahead=Limits.grant,  # a learner's keys for one call
            come_and_go=True,
            capacity=capacity,
        )
    )


def make_coordinator(
    run: Run, replay_buffer: Any, param_store: Any, owner: ProcessId, learner_env: dict[str, str | None]
) -> Coordinator:
    """The node of the program: in the launcher's first try, and whenever it is started again.

    Args:
        run: the session.
        replay_buffer: in the launcher's memory.
        param_store: the same.
        owner: the launcher, with which all workers end.
        learner_env: environment variables of the learner that this node has not, or has others of.
    """
    described, agent, path = run.described, run.agent, coordinator_dir(run.path)
    save_workers(
        path,
        {
            "learner": functools.partial(LearnerWorker, learner_config(run), agent, replay_buffer, param_store),
            "collector": functools.partial(
                CollectorWorker,
                functools.partial(make_actor, described, replay_buffer, run.actor_seed),
                agent,
                param_store,
                seed=described.seed,
            ),
            "evaluator": functools.partial(
                CollectorWorker, None, agent, param_store, evaluations=functools.partial(Evaluations, described)
            ),
        },
    )
    census = Census(RunDir(run.path).progress, run.session)
    cfg = CoordinatorConfig(
        path=str(path),
        job_id=run.session,
        before=census.counts,
        collectors=min(max(described.num_actors, described.min_actors), described.max_actors),
        min_collectors=described.min_actors,
        max_collectors=described.max_actors,
        max_staleness=described.mean_staleness,
        stop_within=max(1.0, described.grace_seconds - 2.0),  # and then the workers have to end
        describes={
            "id": run.path.name,
            "run_dir": str(run.path),
            "agent": described.agent,
            "env": described.env,
            "until": run.until,
        },
        limits=limits_of(described),
    )
    commander = TrainOne(
        POLICY,
        env_steps=run.until,
        learner_steps=described.until_learner_steps,
        seconds=described.until_seconds,
        eval_return=described.until_return,
        eval_every=described.eval_every,
    )
    silence = SILENCE + 2.0 * described.hang_timeout  # a coordinator that hangs, and is started again, finds them yet
    logs = RunDir(run.path).logs
    operator = LocalOperator(path, owner=owner, silence=silence, env={"learner": learner_env}, logs=logs)
    return Coordinator(commander, operator, replay_buffer, param_store, cfg, _Records(run, census))


def limits_of(described: Experiment) -> Limits:
    """The coordinator's deadlines: workers that hang are its to see, as nodes are the launcher's."""
    silent = described.hang_timeout
    limits = Limits(row_every=described.row_every, max_failures=described.max_restarts)
    if not silent:
        return dataclasses.replace(limits, lost_after=math.inf, lost_after_starting=math.inf)
    return dataclasses.replace(
        limits,
        ping_every=min(limits.ping_every, silent / 6),
        suspect_after=min(limits.suspect_after, silent / 3),
        lost_after=silent,
        lost_after_starting=max(limits.lost_after_starting, 4.0 * silent),
    )


def make_actor(described: Experiment, replay_buffer: Any, seed: int, inferencer: Any, rank: int) -> Actor:
    """The Actor of a collector."""
    env_builder = functools.partial(make_pool, described, described.envs_per_actor, described.env_kwargs)
    return Actor(env_builder, inferencer, replay_buffer, rank, seed=seed)


def coordinator_dir(run_dir: pathlib.Path) -> pathlib.Path:
    """Where the coordinator of a run keeps its journal, and its workers their logs."""
    return run_dir / "coordinator"


class _Records:
    """A run's files, as the other topologies write them."""

    def __init__(self, run: Run, census: Census) -> None:
        self._run, self._directory, self._census = run, RunDir(run.path), census
        self._logger: Any = None
        self._first: tuple[float, int] | None = None  # (when, environment steps) of the first row of this process
        self._last = (time.monotonic(), 0)

    def begin(self, env_steps: int) -> None:
        """Takes back the rows that a coordinator wrote which then was killed before it wrote them down."""
        self._logger = self._directory.open_logs(env_steps)

    def write(self, env_steps: int, values: dict[str, Any], census: dict[str, list[float]]) -> None:
        """Takes a row of metrics, and what all collectors have done."""
        if "steps_per_second" in values:
            self._last = time.monotonic(), env_steps
            self._first = self._first or self._last
            values = {**values, "wall_seconds": time.time() - self._run.began}
        self._census.replace(census)
        self._census.try_to_save()
        self._logger.write(env_steps, values)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes the result."""
        evaluation = summary["evaluation"]
        (began, first), (ended, last) = self._first or self._last, self._last
        self._logger.close()
        self._census.save()
        if summary["failed"]:
            return
        self._directory.write_result(
            Result(
                env_steps=summary["env_steps"],
                learner_steps=summary["learner_steps"],
                return_mean=evaluation["return_mean"] if evaluation else None,
                return_std=evaluation["return_std"] if evaluation else None,
                episodes=int(evaluation["episodes"]) if evaluation else 0,
                steps_per_second=(last - first) / max(ended - began, 1e-9),
                wall_seconds=time.time() - self._run.began,
                params_version=summary["params_version"],
                run_dir=str(self._directory.path),
            ).to_json()
        )
