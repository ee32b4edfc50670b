"""The program in which a language model learns, on a screen.

environments ──groups──▶ trajectory service ──batches──▶ learner
     ▲                                                     │
     └──────completions────── policy server ◀──parameters──┘
"""

from __future__ import annotations

from rlframe.language.decoding import EngineConfig
from rlframe.language.server import PolicyServer, PolicyServerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.programs.assemble import CHECKPOINTS_KEPT
from rlframe.programs.experiment import peer_deadline
from rlframe.programs.language.environment import FOR_EVER, MODEL, Environment
from rlframe.programs.language.monitor import LanguageMonitor
from rlframe.programs.language.session import HOST, LanguageRun
from rlframe.programs.run_dir import RunDir
from rlframe.programs.topologies import Engine
from rlframe.trajectories import Client, TrajectoryBuffer
from rlframe.trajectories.service.serving import TrajectoryServer
from rlframe.trajectories.service.settings import Settings

ENV_CHECKPOINT_EVERY = 50  # learner steps between two checkpoints of environments, for those that save something


def light_env(engine: Engine, run: LanguageRun) -> None:
    """All four services, and who watches them."""
    described = run.described
    settings = Settings(store=f"sqlite:{run.path / 'trajectories.db'}")
    engine.add("trajectories", TrajectoryServer, settings, HOST, run.service_port)
    learner = engine.add("learner", make_learner, run)
    decoding = EngineConfig(slots=described.slots, length=described.agent_config.max_tokens)
    policy_config = PolicyServerConfig(
        HOST,
        run.policy_port,
        model_name=MODEL,
        engine=decoding,
        seed=described.seed,
        learner_deadline=peer_deadline(described),
    )
    model_config = run.agent.model_config  # type: ignore[attr-defined]
    policy = engine.add("policy", PolicyServer, policy_config, model_config, described.tokenizer_name, learner)
    environments = [engine.add("environment", Environment, run, rank) for rank in range(described.num_envs)]
    engine.add("monitor", LanguageMonitor, run, learner, policy, environments)


def make_learner(run: LanguageRun) -> Learner:
    """The ordinary Learner, from batches of the trajectory service, where it registers as the trainer."""
    described = run.described
    with Client(run.service_url) as client:
        client.register(
            batch_size=described.agent_config.batch_size,
            max_token_len=described.agent_config.max_tokens,
            checkpoint_dir=str(run.path),
            save_checkpoint_interval=ENV_CHECKPOINT_EVERY,
            num_steps=FOR_EVER,  # the monitor ends the run; other steps would be another registration
            max_staleness=described.max_staleness,
            stale="discard" if described.max_staleness is not None else None,
        )
    cfg = LearnerConfig(
        seed=described.seed,
        max_learner_steps=run.until,  # whatever becomes of the monitor, which ends the program
        ends_program=False,
        checkpoint_dir=str(RunDir(run.path).checkpoints),
        checkpoint_every=described.checkpoint_every,
        checkpoints_kept=CHECKPOINTS_KEPT,
        resume=True,
    )
    return Learner(cfg, run.agent, TrajectoryBuffer(run.service_url))
