"""The topology of language models, which learn from trajectories. Its name on the command line is `light_env`.

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
from rlframe.programs.options.fields import option
from rlframe.programs.session import Session
from rlframe.programs.topologies.config import ProgramConfig, Topology, configured_by

HOST = "127.0.0.1"  # all services of a program run on one machine
ENV_CHECKPOINT_EVERY = 50  # learner steps between two checkpoints of environments that have a state


@dataclasses.dataclass(frozen=True)
class Language(ProgramConfig):
    """Options of the topology of language models."""

    learns_from = "trajectories"
    unit = "learner steps"
    defaults: ClassVar[dict[str, Any]] = {
        "env": "examples/llm/reverse.py:Reverse",
        "steps": 500,
        "num_envs": 1,
        "checkpoint_every": 100,
        "log_every": 1,
    }

    name: str = "light_env"  # the name in `TOPOLOGIES`
    # Tokenizer: byte, or a folder with a tokenizer.json. None means the tokenizer of the loaded weights, or byte.
    tokenizer: Union[str, None] = None
    # Maximum number of versions by which the policy of a group can be older than the learner's. None means no limit.
    max_staleness: Union[int, None] = option(None, at_least=0)
    # Number of sequences that the policy server decodes in parallel.
    slots: int = option(32, at_least=1, changeable=True)
    # Port of the trajectory service and its live page. 0 means any free port.
    service_port: int = option(0, changeable=True)
    # With --learner-devices: each device has only a part of the parameters and of the optimizer's state.
    shard_params: bool = option(False, changeable=True)
    policy_port: int = option(0, changeable=True)  # Port of the policy server. 0 means any free port.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer and self.tokenizer != "byte":  # make it absolute now: an environment may change the folder
            object.__setattr__(self, "tokenizer", os.path.abspath(self.tokenizer))
        if self.shard_params and self.learner_devices == 1:
            raise UsageError("shard_params divides the parameters between devices: set learner_devices to 2 or more.")
        for name in ("service_port", "policy_port"):
            if not 0 <= getattr(self, name) < 2**16:
                raise UsageError(f"{name} must be from 0 to 65535, got {getattr(self, name)}.")

    def check(self, experiment: Experiment) -> None:
        """See `TopologyConfig`."""
        super().check(experiment)
        if experiment.init_from is not None and experiment.agent_config is not None and self.warm_up_steps(experiment):
            raise UsageError(
                "init_from starts from a trained model, but supervised_steps starts from the weights of the supervised "
                "warm-up. Set supervised_steps=0."
            )

    @property
    def service_url(self) -> str:
        """URL of the trajectory service."""
        return f"http://{HOST}:{self.service_port}"

    @property
    def policy_url(self) -> str:
        """URL of the policy server, without `/v1`."""
        return f"http://{HOST}:{self.policy_port}"

    def tokenizer_name(self, agent_config: Any) -> str:
        """Return the tokenizer's name, which is the argument of `load_tokenizer`."""
        return self.tokenizer or agent_config.weights or "byte"

    def warm_up_steps(self, experiment: Experiment) -> int:
        """See `TopologyConfig`."""
        return experiment.agent_config.supervised_steps

    def requires(self, experiment: Experiment) -> list[str]:
        """See `TopologyConfig`."""
        # The warm-up writes its weights in the format of released models. This needs the packages of the extra `lm`.
        config = experiment.agent_config
        published = self.tokenizer_name(config) != "byte" or config.weights or self.warm_up_steps(experiment)
        return ["trajectories", "envs", *(["lm"] if published else [])]

    def extras_option(self, experiment: Experiment) -> str:
        """See `TopologyConfig`."""
        return f"--agent {experiment.agent}"


@configured_by(Language)
def language(engine: Engine, session: Session) -> Topology | None:
    """Add the services, the learner, the environments and the monitor to the engine.

    If the supervised warm-up is not complete, add only the warm-up. Return this function, so that the caller runs it
    again after the warm-up.
    """
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
            engine.add("learner", WarmUpNode, session)  # the warm-up gets the learner's cores and accelerators
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
    """Make the Learner of a language model, and register it with the trajectory service as the trainer."""
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
            num_steps=NO_LAST_STEP,  # the monitor ends the run; a resumed run must register the same number of steps
            max_staleness=config.max_staleness,
            stale="discard" if config.max_staleness is not None else None,
            run_key=session.directory.key(),
        )
    # The steps of this run are learner steps. The learner also stops at the last step, in case the monitor fails.
    every = experiment.checkpoint_every or experiment.steps
    cfg = dataclasses.replace(
        learner_config(session),
        max_learner_steps=session.until,
        checkpoint_every=every,
        shard_params=config.shard_params,
    )
    vocab_size = session.agent.model_config.vocab_size  # type: ignore[attr-defined]
    return Learner(cfg, session.agent, TrajectoryBuffer(config.service_url, vocab_size=vocab_size))


def _with_ports(session: Session) -> Session:
    """Replace each port 0 by a free port, and return the new session. Raise UsageError if a given port is in use."""
    config, found = session.topology_config, {}
    with contextlib.ExitStack() as opened:
        for name in ("service_port", "policy_port"):
            try:
                listener = opened.enter_context(socket.create_server((HOST, getattr(config, name))))
            except OSError as error:
                raise UsageError(
                    f"Cannot listen at {name}={getattr(config, name)} of {HOST}: {error.strerror}. Choose another "
                    "port, or 0 for any free port."
                ) from error
            found[name] = listener.getsockname()[1]
    return dataclasses.replace(session, experiment=session.experiment.with_topology_options(**found))
