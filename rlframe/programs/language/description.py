"""The description of a run in which a language model learns: the counterpart of `rlframe.programs.Experiment`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Union

from rlframe.engines.base import GRACE
from rlframe.errors import UsageError
from rlframe.interprocess.heartbeat import TIMEOUT
from rlframe.programs.experiment import MAX_SEED, EngineName, check_engine_reads


@dataclasses.dataclass(frozen=True)
class LanguageExperiment:
    """What model to train, by what environment, for how long. `config.json` of a run directory holds one of these.

    A step of such a run is an update of the learner, after the supervised ones of the agent's config. `agent_config`
    left at None is the agent's defaults.
    """

    agent: str = "grpo"  # an agent that learns from trajectories, or file.py:Class
    env: str = "examples/llm/reverse.py:Reverse"  # file.py:Class of a BaseEnv
    steps: int = 500  # learner steps of the whole run
    seed: int = 1
    topology: Literal["light_env"] = "light_env"  # environments ask one policy server: see docs/llm.md
    num_envs: int = 1  # processes that collect
    engine: EngineName = "launchpad"  # what runs the nodes; threads: all in this process
    max_restarts: int = 3  # how often each node of the engine launchpad may die and be started again
    hang_timeout: float = TIMEOUT  # seconds without a heartbeat after which a node is killed; 0: none that hangs is
    grace_seconds: float = GRACE  # that nodes have to save and end, once they are told to, before they are killed
    tokenizer: Union[str, None] = None  # byte, or a folder with a tokenizer.json; None: that of the weights, or byte
    max_staleness: Union[int, None] = None  # policy versions that a group may be behind the learner; None: any
    slots: int = 32  # sequences that the policy server decodes at once
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of the environment's own config
    service_port: int = 0  # of the trajectory service and its live page; 0: one that is free
    policy_port: int = 0  # of the policy server; 0: one that is free
    eval_every: int = 0  # learner steps between two evaluations; 0: after the warm-up and at the end only
    checkpoint_every: int = 100  # learner steps between two checkpoints (30 s, where that is shorter)
    log_every: int = 1  # learner steps between two rows of the logs
    agent_config: Any = None

    def __post_init__(self) -> None:
        for name in ("steps", "num_envs", "slots", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("max_restarts", "hang_timeout", "grace_seconds", "eval_every"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be at least 0, got {getattr(self, name)}.")
        for name in ("service_port", "policy_port"):
            if not 0 <= getattr(self, name) < 2**16:
                raise UsageError(f"{name} must be from 0 to 65535, got {getattr(self, name)}.")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be between 0 and {MAX_SEED}, got {self.seed}.")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise UsageError(f"max_staleness must be at least 0, got {self.max_staleness}.")
        if self.topology != "light_env":
            raise UsageError(
                f"A language model learns under the topology light_env, got {self.topology!r}. (Over several machines: "
                "start the four services by hand, as docs/llm.md shows.)"
            )
        check_engine_reads(self)

    @property
    def warmup_steps(self) -> int:
        """Supervised updates, which come first, and are counted first in the logs."""
        return self.agent_config.supervised_steps

    @property
    def tokenizer_name(self) -> str:
        """What `rlframe.language.model.tokenizers.load_tokenizer` takes."""
        return self.tokenizer or self.agent_config.weights or "byte"
