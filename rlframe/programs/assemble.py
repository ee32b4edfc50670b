"""From an experiment to the objects of the design: the one place where they are wired."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.actors import Actor, Evaluator
from rlframe.actors.actor import env_seed
from rlframe.agents import Agent
from rlframe.envs import AsyncEnv, SyncEnv, default_type
from rlframe.errors import UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.programs import naming
from rlframe.programs.experiment import Experiment, total_learner_steps
from rlframe.replay import ReplayBuffer
from rlframe.types import Logs, ReplaySpec, Sequence

CHECKPOINTS_KEPT = 3


@dataclasses.dataclass
class Parts:
    """The objects of one inline run."""

    agent: Agent
    replay_buffer: Any
    learner: Learner
    inferencer: Inferencer
    env_builder: EnvBuilder
    actor: Actor | None = None

    def make_actor(self, seed: int, rank: int | None = None) -> Actor:
        """Makes the Actor; on its own, because a resumed one claims its rank from a buffer that is filled first."""
        self.actor = Actor(self.env_builder, self.inferencer, self.replay_buffer, rank, seed=seed)
        return self.actor

    def close(self) -> None:
        """Closes what was opened, environments first."""
        (self.actor or self.env_builder).close()
        self.learner.close()
        self.replay_buffer.close()


def make_pool(described: Experiment, num_envs: int, env_kwargs: dict[str, Any], seed: int, env: Any = None) -> Any:
    """A pool of `num_envs` of an experiment's environments; `env` is what `described.env` means, where it is known."""
    what = naming.env_name_or_builder(described.env) if env is None else env
    options: dict[str, Any] = {"type": _pool_type(described, num_envs, what), "env_kwargs": env_kwargs}
    options.update({name: getattr(described, name) for name in ("num_workers", "answer_timeout", "check_finite")})
    if described.async_envs:
        return AsyncEnv(what, num_envs, described.waits_for, seed=seed, **options)
    return SyncEnv(what, num_envs, seed=seed, **options)


def _pool_type(described: Experiment, num_envs: int, what: Any) -> str:
    if described.env_type != "auto":
        return described.env_type
    return default_type(what, num_envs, is_sync=not described.async_envs)


def _check_answer_timeout_is_read(described: Experiment) -> None:
    """Raises UsageError for an answer_timeout of a single process whose pool does not see environments hang."""
    default = Experiment.answer_timeout
    if described.answer_timeout == default:
        return
    kind = _pool_type(described, described.num_envs, naming.env_name_or_builder(described.env))
    if kind in ("loop", "envpool"):
        raise UsageError(
            f"answer_timeout={described.answer_timeout:g} is for the env_type thread or process: {kind}, in a single "
            f"process, does not read it. Leave it at {default:g}, or choose another env_type."
        )


class EnvBuilder:
    """Builds an experiment's pool of environments, one at a time.

    The agent needs the specs before an Actor builds the pool: the pool that was built to read them is
    handed out if its seed is the one asked for.
    """

    def __init__(self, described: Experiment, num_envs: int, env_kwargs: dict[str, Any]) -> None:
        self._described = described
        self._num_envs = num_envs
        self._env_kwargs = env_kwargs
        self._pool: Any = None
        self._seed = -1

    def __call__(self, seed: int) -> Any:
        if self._pool is not None and self._seed == seed:
            return self._pool
        self.close()
        self._pool = make_pool(self._described, self._num_envs, self._env_kwargs, seed)
        self._seed = seed
        return self._pool

    @property
    def pool(self) -> Any:
        """The pool that was built last; None before and after."""
        return self._pool

    def close(self) -> None:
        """Closes the pool that was built last."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def assemble(described: Experiment, checkpoint_dir: str | None) -> Parts:
    """Everything of a run but the Actor.

    Args:
        described: the experiment, complete.
        checkpoint_dir: where the Learner saves; None: nowhere.

    Raises:
        UsageError: a name is unknown, an option is not read, or the agent cannot act in this environment.
    """
    _check_answer_timeout_is_read(described)
    env_builder = EnvBuilder(described, described.num_envs, described.env_kwargs)
    pool = env_builder(env_seed(described.seed, 0, 0))
    try:
        agent = make_agent(described, pool.observation_spec, pool.action_spec)
        capacity = replay_capacity(agent.replay_spec, described)
        replay_buffer = ReplayBuffer(agent, seed=described.seed, capacity=capacity)
        learner_cfg = LearnerConfig(
            seed=described.seed, checkpoint_dir=checkpoint_dir, checkpoints_kept=CHECKPOINTS_KEPT
        )
        learner = Learner(learner_cfg, agent, replay_buffer)
        inferencer = Inferencer(InferencerConfig(seed=described.seed), agent, learner)
    except BaseException:
        env_builder.close()
        raise
    return Parts(agent, replay_buffer, learner, inferencer, env_builder)


def replay_capacity(spec: ReplaySpec, described: Experiment) -> int:
    """Steps that a buffer keeps; a queue is as long as what the environments can have in it."""
    if spec.kind == "queue" and isinstance(spec.item, Sequence):
        # What the environments are acting, what they have just completed, and what was too little for a batch. Where
        # they do not wait for each other, one that takes four times as long as the others completes its unroll too.
        unrolls = 4 if described.async_envs else 2
        return (unrolls * described.num_envs + (spec.batch_size or 0)) * spec.item.length
    return spec.capacity


def make_agent(described: Any, observation_spec: Any, action_spec: Any) -> Agent:
    """The agent of an experiment, its schedules set to end where the experiment does."""
    agent_cls: Any = naming.agent_class(described.agent)
    if agent_cls.learns_language:
        return agent_cls(described.agent_config)
    net_factory = naming.network_factory(described.network, described.network_config)
    config = described.agent_config

    def make(cfg: Any) -> Agent:
        agent = agent_cls(cfg, observation_spec, action_spec, net_factory)
        if described.async_envs:
            check_learns_from_async(described.agent, agent.replay_spec)
        return agent

    if getattr(config, "total_learner_steps", 0) is not None:
        return make(config)
    steps = described.schedule_steps or described.steps
    total = total_learner_steps(make(config).replay_spec, steps, described.num_envs)
    return make(dataclasses.replace(config, total_learner_steps=total))


def check_learns_from_async(name: str, spec: ReplaySpec) -> None:
    """Raises UsageError for an agent that needs all environments in step."""
    if spec.max_staleness is not None:
        why = f"max_staleness={spec.max_staleness}: actors wait for new parameters when an unroll is complete"
    elif spec.kind == "queue" and spec.batch_size is None:
        why = "batch_size=None: each batch has one item of every environment"
    else:
        return
    raise UsageError(
        f"The agent {name} cannot learn from asynchronous environments, which complete their unrolls at different "
        f"times: its replay_spec has {why}. Leave --async (async_envs) out, or use an agent that learns off-policy, as "
        "impala and dqn do."
    )


class Evaluations:
    """A run's evaluations: greedy, in environments whose seeds training never used, and the same each time.

    The inferencer is compiled once; the environments are built for each evaluation and closed after it.
    """

    _NEVER = 2**62  # calls: an evaluation is of one version, whatever the learner does meanwhile

    def __init__(self, described: Experiment, agent: Agent, learner: Any) -> None:
        self._described = described.synchronous
        cfg = InferencerConfig(greedy=True, seed=described.seed, sync_interval=self._NEVER)
        self._inferencer = Inferencer(cfg, agent, learner)
        self._begin = self._inferencer.get_state()
        self._evaluator: Evaluator | None = None
        self._stopped = False

    def evaluate(self) -> Logs:
        """As `Evaluator.evaluate`, by the newest parameters."""
        described = self._described
        env_kwargs = {**described.env_kwargs, **described.eval_env_kwargs}
        env_builder = EnvBuilder(described, described.eval_episodes, env_kwargs)
        self._inferencer.set_state(self._begin)
        try:
            self._evaluator = Evaluator(env_builder, self._inferencer, described.eval_episodes, seed=described.seed)
            if self._stopped:
                self._evaluator.stop()
            return self._evaluator.evaluate()
        finally:
            env_builder.close()

    @property
    def steps(self) -> int:
        """Environment steps of the evaluation under way, or of the last one."""
        return self._evaluator.steps if self._evaluator is not None else 0

    def stop(self) -> None:
        """Ends the evaluation under way, and all that come, with StoppedError. Any thread may call it."""
        self._stopped = True
        if self._evaluator is not None:
            self._evaluator.stop()
