"""The topology `language`: a language model learns from trajectories. Its name as an option is `--topology light_env`.

environments ──groups──▶ trajectory service ──batches──▶ learner
     ▲                                                     │
     └──────completions────── policy server ◀──parameters──┘
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from typing import Any, ClassVar, Union

from rlframe.engines import Engine
from rlframe.errors import UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.fields import number
from rlframe.programs.session import Session
from rlframe.programs.topologies.config import ProgramConfig, Topology, configured_by

HOST = "127.0.0.1"  # all of a program's services are on one machine
ENV_CHECKPOINT_EVERY = 50  # learner steps between two checkpoints of environments, for those that save something


@dataclasses.dataclass(frozen=True)
class Language(ProgramConfig):
    """Options of language."""

    learns_from = "trajectories"
    unit = "learner steps"
    defaults: ClassVar[dict[str, Any]] = {
        "env": "examples/llm/reverse.py:Reverse",
        "steps": 500,
        "num_envs": 1,
        "checkpoint_every": 100,
        "log_every": 1,
    }

    name: str = "light_env"  # as in `TOPOLOGIES`
    tokenizer: Union[str, None] = None  # byte, or a folder with a tokenizer.json; None: that of the weights, or byte
    # policy versions that a group may be behind the learner; None: any
    max_staleness: Union[int, None] = number(None, at_least=0)
    slots: int = number(32, at_least=1)  # sequences that the policy server decodes at once
    service_port: int = 0  # of the trajectory service and its live page; 0: one that is free
    policy_port: int = 0  # of the policy server; 0: one that is free

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer and self.tokenizer != "byte":  # once: an environment may change the directory
            object.__setattr__(self, "tokenizer", os.path.abspath(self.tokenizer))
        for name in ("service_port", "policy_port"):
            if not 0 <= getattr(self, name) < 2**16:
                raise UsageError(f"{name} must be from 0 to 65535, got {getattr(self, name)}.")

    @property
    def service_url(self) -> str:
        """URL of the trajectory service."""
        return f"http://{HOST}:{self.service_port}"

    @property
    def policy_url(self) -> str:
        """URL of the policy server, without `/v1`."""
        return f"http://{HOST}:{self.policy_port}"

    def tokenizer_name(self, agent_config: Any) -> str:
        """Name of the tokenizer, for `load_tokenizer`."""
        return self.tokenizer or agent_config.weights or "byte"

    def warm_up_steps(self, experiment: Experiment) -> int:
        """See `TopologyConfig`."""
        return experiment.agent_config.supervised_steps

    def requires(self, experiment: Experiment) -> list[str]:
        """See `TopologyConfig`."""
        # The warm-up writes the weights that it leads to in the published format.
        config = experiment.agent_config
        published = self.tokenizer_name(config) != "byte" or config.weights or self.warm_up_steps(experiment)
        return ["trajectories", "envs", *(["lm"] if published else [])]

    def extras_option(self, experiment: Experiment) -> str:
        """See `TopologyConfig`."""
        return f"--agent {experiment.agent}"


@configured_by(Language)
def language(engine: Engine, session: Session) -> Topology | None:
    """Add the services, the learner, the environments and the monitor. The warm-up is a program before that one."""
    from rlframe.language.decoding import EngineConfig
    from rlframe.language.server import PolicyServer, PolicyServerConfig
    from rlframe.programs.topologies.language_nodes import MODEL, EnvironmentNode, WarmUpNode, check_environment
    from rlframe.programs.topologies.makers import make_agent
    from rlframe.programs.training.language_monitor import LanguageMonitor
    from rlframe.trajectories.config import Settings
    from rlframe.trajectories.service.app import TrajectoryServer

    session = _with_ports(session)
    check_environment(session)
    experiment, config = session.experiment, Language.of(session.experiment)
    tokenizer = config.tokenizer_name(experiment.agent_config)
    if config.warm_up_steps(experiment):
        if not session.directory.warmup.exists():
            engine.add("learner", WarmUpNode, session)  # with the learner's cores and accelerators
            return language
        weights = dataclasses.replace(experiment.agent_config, weights=str(session.directory.warmup))
        session = dataclasses.replace(session, agent=make_agent(dataclasses.replace(experiment, agent_config=weights)))
    store = f"sqlite:{session.path / 'trajectories.db'}"
    settings = Settings(HOST, port=config.service_port, store=store, tokenizer=tokenizer)
    engine.add("trajectories", TrajectoryServer, settings)
    learner = engine.add("learner", make_learner, session)
    policy_config = PolicyServerConfig(
        HOST,
        port=config.policy_port,
        model_name=MODEL,
        engine=EngineConfig(slots=config.slots, length=experiment.agent_config.max_tokens),
        seed=experiment.seed,
        learner_deadline=session.peer_deadline,
    )
    model_config = session.agent.model_config  # type: ignore[attr-defined]
    policy = engine.add("policy", PolicyServer, policy_config, model_config, tokenizer, learner)
    environments = [engine.add("environment", EnvironmentNode, session, rank) for rank in range(experiment.num_envs)]
    engine.add("monitor", LanguageMonitor, session, learner, policy, environments)
    return None


def make_learner(session: Session) -> Any:
    """Register at the trajectory service as the trainer, and make the Learner of its batches."""
    from rlframe.learners import Learner
    from rlframe.programs.topologies.language_nodes import NO_LAST_STEP
    from rlframe.programs.topologies.makers import learner_config
    from rlframe.trajectories import TrajectoryBuffer, TrajectoryClient

    experiment, config = session.experiment, Language.of(session.experiment)
    with TrajectoryClient(config.service_url) as client:
        client.register(
            batch_size=experiment.agent_config.batch_size,
            max_token_len=experiment.agent_config.max_tokens,
            checkpoint_dir=str(session.path),
            save_checkpoint_interval=ENV_CHECKPOINT_EVERY,
            num_steps=NO_LAST_STEP,  # the monitor ends the run; other steps would be another registration
            max_staleness=config.max_staleness,
            stale="discard" if config.max_staleness is not None else None,
            run_key=session.directory.key(),
        )
    # The run's steps are learner steps. They are a limit here, too: the monitor, which ends the program, may fail.
    every = experiment.checkpoint_every or experiment.steps
    cfg = dataclasses.replace(learner_config(session), max_learner_steps=session.until, checkpoint_every=every)
    vocab_size = session.agent.model_config.vocab_size  # type: ignore[attr-defined]
    return Learner(cfg, session.agent, TrajectoryBuffer(config.service_url, vocab_size=vocab_size))


def _with_ports(session: Session) -> Session:
    """Return the session with free ports in place of 0. Raise UsageError if a port that was asked for is in use."""
    config, found = session.topology_config, {}
    with contextlib.ExitStack() as opened:
        for name in ("service_port", "policy_port"):
            try:
                listener = opened.enter_context(socket.create_server((HOST, getattr(config, name))))
            except OSError as error:
                raise UsageError(
                    f"Port {getattr(config, name)} of {HOST} cannot be listened at: {error.strerror}."
                ) from error
            found[name] = listener.getsockname()[1]
    return dataclasses.replace(session, experiment=session.experiment.with_topology_options(**found))
