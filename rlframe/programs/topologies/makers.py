"""Functions that topologies of games call. Each one makes an object, or its options, from an experiment.

- Environments: `make_pool`, `make_jax_envs`, `env_builder`.
- The agent, with its network and normalization: `make_agent`.
- Options of nodes: `inferencer_config`, `learner_config`, `actor_options`.
- The replay buffer: `add_replay`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from rlframe.agents import Agent, Normalized
from rlframe.agents.schedules import checked_for_run, function_names
from rlframe.engines import Engine
from rlframe.engines.base import RunsReverb
from rlframe.envs import AsyncEnv, SyncEnv, default_type
from rlframe.envs.adapters import env_seed
from rlframe.envs.codec import Codec
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.envs.jax_envs import make_jax_env
from rlframe.envs.wrappers import stacked_spec
from rlframe.errors import UsageError
from rlframe.inferencers import InferencerConfig
from rlframe.learners import LearnerConfig
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.fields import parse_ids
from rlframe.programs.options.object_names import load_object
from rlframe.programs.options.registry import takes
from rlframe.programs.run_dir.directory import CHECKPOINTS_KEPT
from rlframe.programs.session import Session
from rlframe.programs.topologies.config import EnvOptions, GameConfig, GameProgram
from rlframe.programs.training.updates import total_learner_steps, updates_between
from rlframe.replay import BaseReplayBuffer, ReplayBuffer
from rlframe.replay.rate_limiter import ROUNDS_AHEAD, items_of_rounds
from rlframe.types import AgentSpecs, ReplaySpec, Sequence

# --- environments and actors


def make_pool(experiment: Experiment, num_envs: int, env_kwargs: dict[str, Any], seed: int) -> Any:
    """Make a pool of `num_envs` environments of an experiment."""
    config = EnvOptions.of(experiment)
    env = registry.env_name_or_builder(experiment.env)
    options: dict[str, Any] = {"type": env_pool_type(experiment, num_envs, env), "env_kwargs": env_kwargs}
    shared = (
        *("num_workers", "answer_timeout", "check_finite", "frame_stack", "action_repeat", "clip_rewards"),
        "action_mask",
    )
    options.update({name: getattr(config, name) for name in shared})
    if config.async_envs:
        return AsyncEnv(env, num_envs, experiment.num_awaited_envs, seed=seed, **options)
    return SyncEnv(env, num_envs, seed=seed, **options)


def env_pool_type(experiment: Experiment, num_envs: int, env: Any) -> str:
    """Return the type of environment pool for `num_envs` environments: one of `SYNC_TYPES`."""
    config = EnvOptions.of(experiment)
    return default_type(env, num_envs, is_sync=not config.async_envs) if config.env_type == "auto" else config.env_type


def make_jax_envs(experiment: Experiment) -> BatchedJaxEnv:
    """Make the JAX environments of an experiment whose `env_pool_type` is `jax`."""
    config, env = EnvOptions.of(experiment), registry.env_name_or_builder(experiment.env)
    made = make_jax_env(env, experiment.env_kwargs)
    return BatchedJaxEnv(made, config.action_repeat, config.frame_stack, config.action_mask)


def env_builder(experiment: Experiment) -> functools.partial[Any]:
    """Return a function that makes the environment pool of an actor from its `seed`."""
    return functools.partial(make_pool, experiment, experiment.envs_per_pool, experiment.env_kwargs)


def check_pool_options(experiment: Experiment) -> None:
    """Raise UsageError if the user set `num_workers` or `answer_timeout`, but the pool and the engine do not use it."""
    config, default = experiment.topology_config, EnvOptions.answer_timeout
    if not isinstance(config, EnvOptions) or (config.num_workers is None and config.answer_timeout == default):
        return
    kind = env_pool_type(experiment, experiment.envs_per_pool, registry.env_name_or_builder(experiment.env))
    if config.num_workers is not None and kind == "loop":
        raise UsageError(
            f"num_workers={config.num_workers} is for the env_type thread, process or envpool. The env_type loop steps "
            "all environments in one thread. Add --env-type process (env_type), or leave num_workers out."
        )
    if config.answer_timeout == default or "hang_timeout" in config.engine_class.options:
        return
    if kind in ("loop", "envpool", "jax"):
        raise UsageError(
            f"answer_timeout={config.answer_timeout:g} is for the env_type thread or process. The env_type {kind} "
            f"does not read it in a single process. Leave it at {default:g}, or choose another env_type."
        )


def actor_options(session: Session) -> dict[str, Any]:
    """Return keyword arguments of the class Actor. They are equal for all actors of a program."""
    return {"seed": session.actor_seed, "deadline": session.peer_deadline, "budget": session.budget}


# --- agent, inferencer, learner


def read_codec(experiment: Experiment) -> Codec | None:
    """Open an environment of the experiment to read its codec, and close it. Return None for a language model."""
    if experiment.topology_config.learns_from != "steps":
        return None
    seed = env_seed(experiment.seed, 0, 0)
    with contextlib.closing(make_pool(experiment.synchronous, 1, experiment.env_kwargs, seed)) as pool:
        return pool.codec


def make_agent(experiment: Experiment, codec: Codec | None = None) -> Agent:
    """Make the agent of an experiment. Its schedules end at `schedule_steps`, or at the experiment's last step.

    Args:
        experiment: The experiment.
        codec: Codec of the environments. None means to get it from `read_codec`.
    """
    agent_cls: Any = registry.agent_class(experiment.agent)
    config = load_functions(experiment.agent_config)
    steps = experiment.schedule_steps or experiment.steps
    has_last_step = hasattr(config, "total_learner_steps") and config.total_learner_steps is None
    if agent_cls.learns_from != "steps":
        known = {"total_learner_steps": steps} if has_last_step else {}
        return agent_cls(checked_for_run(dataclasses.replace(config, **known)))
    topology = GameConfig.of(experiment)
    codec = codec or read_codec(experiment)
    assert codec is not None
    observation_spec = stacked_spec(codec.observation_spec, topology.frame_stack)
    net_factory = registry.network_factory(topology.network, topology.network_config)
    networks = {} if net_factory is None else {"net_factory": net_factory}

    def make(cfg: Any) -> Agent:
        agent = agent_cls(cfg, observation_spec, codec.action_spec, **networks)
        if topology.async_envs:
            check_supports_async(experiment.agent, agent.replay_spec)
        if not (topology.normalize_observations or topology.normalize_rewards):
            return agent
        return Normalized(
            agent,
            observations=topology.normalize_observations,
            observation_clip=topology.observation_clip,
            rewards=topology.normalize_rewards,
            reward_clip=topology.reward_clip,
        )

    # Without schedules, or if the user set the step at which they end, the config is complete.
    if not has_last_step:
        return make(checked_for_run(config))
    spec = make(config).replay_spec  # make a temporary agent, because the last step is not known yet
    known = {"total_learner_steps": total_learner_steps(spec, steps, experiment.num_envs)}
    if hasattr(config, "envs_per_batch"):
        known["envs_per_batch"] = config.envs_per_batch or experiment.num_envs
    return make(checked_for_run(dataclasses.replace(config, **known)))


def load_functions(config: Any) -> Any:
    """Return an agent's config in which schedules that are names of functions are replaced by the functions.

    Raises:
        UsageError: A name does not exist, or is not the name of a function.
    """
    found = {name: load_object(value, name) for name, value in function_names(config).items()}
    for name, function in found.items():
        if not takes(function, 1) or isinstance(function, type):
            raise UsageError(
                f"{name}={getattr(config, name)} is {function!r}. A schedule must be a function: number of learner "
                "steps -> value."
            )
    return dataclasses.replace(config, **found) if found else config


def check_supports_async(name: str, spec: ReplaySpec) -> None:
    """Raise UsageError if an agent cannot learn from asynchronous environments."""
    if spec.max_staleness is not None:
        why = f"max_staleness={spec.max_staleness}, so actors wait for new parameters after each unroll"
    elif spec.kind == "queue" and spec.batch_size is None:
        why = "batch_size=None, so each batch needs one item of every environment"
    else:
        return
    raise UsageError(
        f"The agent {name} cannot learn from asynchronous environments, which complete their unrolls at different "
        f"times. Its replay_spec has {why}. Leave --async (async_envs) out, or use an off-policy agent such as impala "
        "or dqn."
    )


def inferencer_config(session: Session, index: int = 0) -> InferencerConfig:
    """Return the config of the inferencer with number `index` of a program."""
    devices = _device_ids(session, "actor_device_ids")
    return InferencerConfig(
        seed=session.experiment.seed,
        learner_deadline=session.peer_deadline,
        device=None if devices is None else devices[index % len(devices)],
    )


def _device_ids(session: Session, option: str) -> tuple[int, ...] | None:
    """Return the devices that an option of `GameProgram` lists. None: the topology has no such option, or no value."""
    text = getattr(session.topology_config, option, None)
    return None if text is None else parse_ids(option, text)


def learner_config(session: Session) -> LearnerConfig:
    """Return the config of a program's learner. Convert its checkpoint interval to learner steps."""
    experiment, steps = session.experiment, session.experiment.steps
    # Estimate the updates per checkpoint from steps after the run, because the first steps of a run cause no updates.
    between = steps, steps + (experiment.checkpoint_every or steps)
    return LearnerConfig(
        seed=experiment.seed,
        max_learner_steps=session.topology_config.stop_conditions.learner_steps,
        ends_program=False,  # the monitor ends the program after the final evaluation
        checkpoint_dir=str(session.directory.checkpoints),
        checkpoint_every=max(1, updates_between(session.agent.replay_spec, *between, experiment.num_envs)),
        checkpoints_kept=CHECKPOINTS_KEPT,
        resume=True,  # a restarted learner must continue from its checkpoint
        num_envs=experiment.num_envs if session.agent.learns_from == "steps" else None,
        codec=session.codec,
        devices=_device_ids(session, "learner_device_ids") or session.topology_config.learner_devices,
    )


# --- replay


def add_replay(engine: Engine, session: Session) -> Any:
    """Make the replay buffer of an experiment. Return the buffer, or a handle to a replay server."""
    experiment, kind = session.experiment, GameConfig.of(session.experiment).replay_kind
    capacity = replay_capacity(session.agent.replay_spec, experiment)
    if kind == "reverb":
        return add_reverb(engine, session, capacity, experiment.num_envs)
    if kind == "service":
        return add_service(engine, session, capacity, experiment.num_envs)
    if kind == "shared_memory":
        return add_shared_memory(
            engine, session, GameConfig.of(experiment).num_actors, capacity, timeout=max(600.0, session.peer_deadline)
        )
    replay_cls = ReplayBuffer if kind == "local" else load_object(kind, "replay")
    if not (isinstance(replay_cls, type) and issubclass(replay_cls, BaseReplayBuffer)):
        raise UsageError(
            f"--replay {kind} is {replay_cls!r}, which is not a subclass of rlframe.replay.BaseReplayBuffer. Its "
            "constructor is called as Class(agent, seed=..., capacity=...)."
        )
    make: Any = replay_cls  # Any, because constructors of subclasses can differ
    return engine.own(make(session.agent, seed=experiment.seed, capacity=capacity))


def add_shared_memory(engine: Engine, session: Session, num_writers: int, capacity: int, **options: Any) -> Any:
    """Make a replay buffer in shared memory, for the nodes of this machine."""
    from rlframe.replay import SharedMemReplayBuffer

    experiment = session.experiment
    replay_buffer = SharedMemReplayBuffer(
        session.agent,
        num_writers=num_writers,
        seed=experiment.seed,
        max_envs=experiment.envs_per_actor,
        in_threads=engine.in_process,
        capacity=capacity,
        **options,
    )
    return engine.own(replay_buffer)


def add_service(engine: Engine, session: Session, capacity: int, num_envs: int, rounds: int = ROUNDS_AHEAD) -> Any:
    """Add one replay service node per shard. Return a client that uses all shards.

    In a queue, each shard has the full capacity. Otherwise, the shards divide the capacity equally.

    Args:
        engine: The engine that runs the nodes.
        session: The session.
        capacity: Number of steps that the replay keeps.
        num_envs: Total number of environments of all writers.
        rounds: Limit of how far writers can be ahead of `samples_per_insert`. See `items_of_rounds`.
    """
    from rlframe.replay.service import ReplayService, ServiceReplayBuffer

    experiment, spec = session.experiment, session.agent.replay_spec
    shards = GameProgram.of(experiment).replay_shards
    # A batch comes from one shard, so each shard of a queue must be able to hold a full batch.
    capacity = capacity if spec.kind == "queue" else -(-capacity // shards)
    shares = {"capacity": capacity, "min_size": -(-spec.min_size // shards)}
    ahead = items_of_rounds(spec, num_envs, rounds)
    specs = AgentSpecs(spec, session.agent.step_spec)
    services = [
        engine.add(
            "replay",
            ReplayService,
            specs,
            str(session.directory.replay_service.absolute() / f"{shard}-of-{shards}"),
            seed=experiment.seed + shard,
            at_end=session.topology_config.grace_seconds / 2.0,
            run_ahead=None if ahead is None else -(-ahead // shards),
            **shares,
        )
        for shard in range(shards)
    ]
    return ServiceReplayBuffer(specs, services)


def add_reverb(engine: Engine, session: Session, capacity: int, num_envs: int, rounds: int = ROUNDS_AHEAD) -> Any:
    """Add a Reverb server, and return a handle to it. See `add_service` for the arguments."""
    from rlframe.replay.reverb import ReverbReplayBuffer

    experiment, spec = session.experiment, session.agent.replay_spec
    # Synchronous environments complete their unrolls at the same step, so one item holds all of these unrolls.
    in_step = spec.kind == "queue" and not EnvOptions.of(experiment).async_envs
    block = experiment.envs_per_pool if in_step else 1
    ahead = items_of_rounds(spec, num_envs, rounds)
    tables = ReverbReplayBuffer.tables(session.agent, block=block, when_full="wait", capacity=capacity, run_ahead=ahead)
    assert isinstance(engine, RunsReverb), "`GameProgram` refuses an engine that cannot run Reverb."
    return engine.add_reverb("replay", tables, str(session.directory.reverb))


def replay_capacity(spec: ReplaySpec, experiment: Experiment) -> int:
    """Return the capacity of a replay buffer, in steps. A queue can hold all unrolls that exist at the same time."""
    if spec.kind == "queue" and isinstance(spec.item, Sequence):
        # A queue must hold two unrolls per environment (the current and the previous one), and an incomplete batch.
        # With asynchronous environments, it holds four, because some environments can be four times slower than others.
        unrolls = 4 if EnvOptions.of(experiment).async_envs else 2
        return (unrolls * experiment.num_envs + (spec.batch_size or 0)) * spec.item.length
    return spec.capacity
