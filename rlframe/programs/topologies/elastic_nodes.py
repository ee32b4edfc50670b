"""The nodes and workers of the topology elastic. Its options are in `elastic.py`.

Every command reads the options of all topologies, and the import of a coordinator takes a tenth of a second. So only a
run with this topology imports this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlframe.actors import Actor
from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.config import CoordinatorConfig, JobRecorder, Limits
from rlframe.coordinator.coordinator import Coordinator
from rlframe.coordinator.operators import Operator
from rlframe.coordinator.operators.supervised import RayOperator
from rlframe.coordinator.param_store import ParamStore
from rlframe.coordinator.workers.game_workers import CollectorWorker, EvaluatorWorker
from rlframe.coordinator.workers.learner_worker import LearnerWorker
from rlframe.engines import Engine
from rlframe.engines.base import MakeWorker, StartsWorkers
from rlframe.engines.devices import NO_ACCELERATOR
from rlframe.engines.logs import NullStream
from rlframe.errors import PeerError, StoppedError
from rlframe.learners.saving import BestCheckpoint
from rlframe.metrics.rows import ActorCounts
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.policies.evaluation import EvaluationOutcome, Evaluations, explain
from rlframe.programs.run_dir.directory import ProgressFile
from rlframe.programs.session import Session
from rlframe.programs.topologies.makers import (
    add_reverb,
    add_service,
    add_shared_memory,
    env_builder,
    learner_config,
    replay_capacity,
)
from rlframe.programs.training.row_writer import RowWriter

if TYPE_CHECKING:
    from rlframe.programs.topologies.elastic import Elastic

POLICY = "main"


def add_nodes(engine: Engine, session: Session) -> None:
    """Add a coordinator. It starts and stops collectors (workers with an actor) according to the learner's load."""
    replay_buffer, config = add_elastic_replay(engine, session), _options(session.experiment)
    if config.spans_machines:
        param_store = engine.add("params", ParamStore, at_end=max(1.0, config.grace_seconds - 1.0))
    else:
        param_store = engine.own(ParamStore())
    makers = worker_makers(session, replay_buffer, param_store)
    engine.add(
        "coordinator", make_coordinator, session, replay_buffer, param_store, add_operator(engine, session, makers)
    )


def _options(experiment: Experiment) -> Elastic:
    options: Any = experiment.topology_config
    return options


def worker_makers(session: Session, replay_buffer: Any, param_store: Any) -> dict[str, MakeWorker]:
    """Return a dict: role -> function that makes a worker of this role, and is called in the worker's process."""
    experiment, agent = session.experiment, session.agent
    evaluations = functools.partial(Evaluations, experiment, best=BestCheckpoint(session.directory.checkpoints))
    return {
        "learner": functools.partial(LearnerWorker, learner_config(session), agent, replay_buffer, param_store),
        "collector": functools.partial(
            CollectorWorker,
            functools.partial(make_actor, experiment, replay_buffer, session.actor_seed),
            agent,
            param_store,
            seed=experiment.seed,
        ),
        "evaluator": functools.partial(EvaluatorWorker, evaluations, agent, param_store),
    }


def add_elastic_replay(engine: Engine, session: Session) -> Any:
    """Make the experiment's replay buffer. Return an object with which any process of the run can access it."""
    experiment, config = session.experiment, _options(session.experiment)
    most = config.max_actors
    # The capacity per collector is the same as the capacity per actor in other topologies.
    capacity = replay_capacity(session.agent.replay_spec, experiment) * most // config.num_actors
    # A grant has at most `Limits.grant` batches. Let writers be ahead by this number of rounds, to provide all of them.
    writers_envs = most * experiment.envs_per_actor
    if config.replay_kind == "reverb":
        from rlframe.replay.reverb import ReverbReplayBuffer

        add_reverb(engine, session, capacity, num_envs=writers_envs, rounds=Limits.grant)
        return ReverbReplayBuffer(session.agent, engine.address_of("replay"))
    if config.replay_kind == "service":
        return add_service(engine, session, capacity, num_envs=writers_envs, rounds=Limits.grant)
    # Use no timeout, because a run can be paused for long. The coordinator detects a learner that hangs.
    return add_shared_memory(
        engine, session, most, capacity, timeout=math.inf, rounds_ahead=Limits.grant, elastic_writers=True
    )


def add_operator(engine: Engine, session: Session, makers: Mapping[Any, MakeWorker]) -> Operator:
    """Make the operator in this process, so that a restarted coordinator finds the same workers."""
    config = _options(session.experiment)
    options: dict[str, Any] = {
        "output": NullStream() if session.quiet else None,
        "logs": session.directory.logs,
        "hang_timeout": config.hang_timeout,
    }
    if config.operator_name == "ray":
        assert isinstance(engine, StartsWorkers), "`Elastic` refuses other engines."
        # Evaluators run rarely, so no node is reserved for them.
        most = {"learner": 1, "collector": config.max_actors, "evaluator": 0}
        operator: Operator = RayOperator(engine.worker_nodes(makers, most), **options)
    else:
        env = {} if "learner" in config.accelerators else {"learner": NO_ACCELERATOR}
        operator = registry.operator_class(config.operator_name)(makers, env=env, **options)
    return engine.own(operator)


def make_coordinator(session: Session, replay_buffer: Any, param_store: Any, operator: Operator) -> Coordinator:
    """Make the Coordinator. Its node calls this at the first start and after each restart.

    Args:
        session: The session.
        replay_buffer: The replay buffer, or a client of it.
        param_store: The `ParamStore`, or a handle to it.
        operator: The operator in the launcher, or a handle to it.
    """
    experiment, config = session.experiment, _options(session.experiment)
    progress = ProgressFile(session.directory.progress, session.session_id)
    cfg = CoordinatorConfig(
        path=str(session.directory.coordinator),
        job_id=session.session_id,
        counts_before=progress.counts,
        collectors=min(max(config.num_actors, config.min_actors), config.max_actors),
        min_collectors=config.min_actors,
        max_collectors=config.max_actors,
        cores=config.max_actors if config.spans_machines else None,
        mean_staleness=config.mean_staleness,
        evaluates=config.evaluates,
        stop_within=max(1.0, config.grace_seconds - 2.0),  # leave 2 seconds for the exit of the workers
        run_info={
            "id": session.path.name,
            "run_dir": str(session.path),
            "agent": experiment.agent,
            "env": experiment.env,
            "until": session.until,
        },
        limits=make_limits(experiment),
    )
    commander = TrainOne(
        policy_id=POLICY,
        env_steps=session.until,
        learner_steps=config.until_learner_steps,
        seconds=config.until_seconds,
        eval_return=config.until_return,
        eval_every=experiment.eval_every,
    )
    records = _Records(session, progress, param_store)
    return Coordinator(commander, operator, replay_buffer, param_store, cfg, records)


def make_limits(experiment: Experiment) -> Limits:
    """Return the coordinator's limits and timeouts, which depend on the experiment's `hang_timeout`."""
    config = _options(experiment)
    silent = config.hang_timeout or math.inf
    return Limits(
        row_every=experiment.row_every,
        max_failures=config.max_restarts,
        ping_every=min(Limits.ping_every, silent / 6),
        suspect_after=min(Limits.suspect_after, silent / 3),
        lost_after=silent,
        lost_after_starting=max(Limits.lost_after_starting, 4.0 * silent),
    )


def make_actor(
    experiment: Experiment,
    replay_buffer: Any,
    seed: int,
    inferencer: Any,
    rank: int,
    env_kwargs: dict[str, Any] | None = None,
) -> Actor:
    """Make the Actor of a collector. Values in `env_kwargs` replace values in the experiment's `env_kwargs`."""
    experiment = dataclasses.replace(experiment, env_kwargs={**experiment.env_kwargs, **(env_kwargs or {})})
    return Actor(env_builder(experiment), inferencer, replay_buffer, rank, seed=seed)


class _Records(JobRecorder):
    """A writer for the coordinator's rows. It writes the same files as the other topologies."""

    def __init__(self, session: Session, progress: ProgressFile, param_store: Any) -> None:
        self._session, self._progress, self._param_store = session, progress, param_store
        self._rows: Any = None

    def begin(self, counts: ActorCounts) -> None:
        """Open the files. Remove rows that a killed coordinator wrote to the files, but not to its journal."""
        self._rows = RowWriter(self._session, counts.env_steps, counts)

    def write(self, env_steps: int, row: dict[str, Any], counts: ActorCounts) -> None:
        """Write a row, and the counts of the collectors."""
        self._progress.counts = counts
        self._progress.try_to_save()
        if "steps_per_second" in row:
            self._rows.record_step(env_steps)
        self._rows.log(env_steps, row)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the result, and end the parameter node, which no worker needs any more."""
        with contextlib.suppress(PeerError, StoppedError):
            self._param_store.finish()
        self._rows.close()
        self._progress.save()
        if not summary["failed"]:
            by = summary["stopped_by"]
            by = self._session.last_step_reason if by == "steps" else by
            env_steps, error = summary["env_steps"], summary["evaluation_error"]
            evaluation = EvaluationOutcome(env_steps, summary["evaluation"], error and explain(error))
            self._session.directory.write_result(self._rows.result(env_steps, summary, evaluation, by))
