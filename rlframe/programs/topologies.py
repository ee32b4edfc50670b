"""The programs of several processes, each wiring on a screen.

They are made of the objects of a single-process run, constructed with the same arguments; an engine
(`rlframe.engines`) decides what runs them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

from rlframe.actors import Actor
from rlframe.actors.actor import env_seed
from rlframe.agents import Agent
from rlframe.engines import Engine
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.programs.assemble import CHECKPOINTS_KEPT, make_pool, replay_capacity
from rlframe.programs.experiment import Experiment, peer_deadline, total_learner_steps
from rlframe.programs.monitor import Monitor
from rlframe.programs.run_dir import RunDir
from rlframe.replay import SharedMemReplayBuffer


@dataclasses.dataclass(frozen=True)
class Run:
    """One session of a run, as its nodes need to know it."""

    described: Experiment
    agent: Agent
    path: pathlib.Path  # of the run directory
    until: int  # environment steps at which this session ends
    began: float  # seconds since the epoch
    resumed_at: int = 0  # environment steps of the sessions before
    listen: int | None = None  # the port at which other machines may join it

    @property
    def actor_seed(self) -> int:
        """Seed of the actors; another in each session, whose actors' incarnations begin anew."""
        seed = self.described.seed
        return env_seed(seed, self.resumed_at) if self.resumed_at else seed

    @property
    def budget(self) -> int:
        """Environment steps that each actor may take before the monitor has been heard."""
        return math.ceil((self.until - self.resumed_at) / self.described.num_actors)

    @property
    def session(self) -> str:
        """Names the session among those of its run."""
        return f"{self.began!r}"


def heavy_env(engine: Engine, run: Run) -> None:
    """For environments that are worth a process each: an inferencer beside each actor."""
    described, agent = run.described, run.agent
    replay_buffer = add_replay(engine, run)
    learner = engine.add("learner", Learner, learner_config(run), agent, replay_buffer)
    cfg = InferencerConfig(seed=described.seed, learner_deadline=peer_deadline(described))
    options = {"seed": run.actor_seed, "deadline": peer_deadline(described), "budget": run.budget}
    actors = []
    for rank in range(described.num_actors):
        inferencer = Inferencer(cfg, agent, learner)
        env_builder = functools.partial(make_pool, described, described.envs_per_actor, described.env_kwargs)
        actors.append(engine.add("actor", Actor, env_builder, inferencer, replay_buffer, rank, **options))
    engine.add("monitor", Monitor, run, learner, actors)


def light_env(engine: Engine, run: Run) -> None:
    """For environments that are cheap beside the network: inferencers as services, which batch the actors' calls."""
    described, agent = run.described, run.agent
    replay_buffer = add_replay(engine, run)
    learner = engine.add("learner", Learner, learner_config(run), agent, replay_buffer)
    cfg = InferencerConfig(seed=described.seed, learner_deadline=peer_deadline(described))
    options = {
        "seed": run.actor_seed,
        "deadline": peer_deadline(described),
        "budget": run.budget,
        "num_pools": described.num_pools,
    }
    inferencers = [engine.add("inferencer", Inferencer, cfg, agent, learner) for _ in range(described.num_inferencers)]
    actors = []
    for rank in range(described.num_actors):
        env_builder = functools.partial(make_pool, described, described.envs_per_pool, described.env_kwargs)
        actors.append(engine.add("actor", Actor, env_builder, inferencers, replay_buffer, rank, **options))
    engine.add("monitor", Monitor, run, learner, actors)


# The same objects, with Reverb between actors and learner in place of shared memory: see `add_replay`.
distributed = light_env

TOPOLOGIES: dict[str, Callable[[Engine, Run], None]] = {
    "heavy_env": heavy_env,
    "light_env": light_env,
    "distributed": distributed,
}


def add_replay(engine: Engine, run: Run) -> Any:
    """The replay that the experiment asks for: an object, or the handle to a server."""
    described, agent, spec = run.described, run.agent, run.agent.replay_spec
    capacity = replay_capacity(spec, described)
    if described.replay_kind == "shared_memory":
        replay_buffer = SharedMemReplayBuffer(
            agent,
            num_writers=described.num_actors,
            seed=described.seed,
            max_envs=described.envs_per_actor,
            timeout=max(600.0, peer_deadline(described)),
            in_threads=described.engine == "threads",
            capacity=capacity,
        )
        return engine.own(replay_buffer)
    return add_reverb(engine, run, capacity)


def add_reverb(engine: Engine, run: Run, capacity: int) -> Any:
    """A Reverb server of `capacity` steps: the handle to it."""
    from rlframe.replay.reverb import ReverbReplayBuffer

    described, agent = run.described, run.agent
    # Environments in step complete their unrolls with the same step: they are sent as one item.
    in_step = agent.replay_spec.kind == "queue" and not described.async_envs
    block = described.envs_per_pool if in_step else 1
    tables = ReverbReplayBuffer.tables(agent, block=block, capacity=capacity)
    return engine.add_reverb("replay", tables, str(RunDir(run.path).reverb))


def learner_config(run: Run) -> LearnerConfig:
    """What the experiment counts in environment steps, in learner steps."""
    described, spec = run.described, run.agent.replay_spec
    steps, every = described.steps, described.checkpoint_every or described.steps
    updates = total_learner_steps(spec, steps + every, described.num_envs)
    updates -= total_learner_steps(spec, steps, described.num_envs)  # without those that the first items wait for
    return LearnerConfig(
        seed=described.seed,
        checkpoint_dir=str(RunDir(run.path).checkpoints),
        checkpoint_every=max(1, updates),
        checkpoints_kept=CHECKPOINTS_KEPT,
        resume=True,  # after its restart, and in a resumed run
    )
