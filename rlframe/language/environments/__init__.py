"""Environments for language models. All names are the same as in `atroposlib`, so `atroposlib`'s environments run here.

If `my_env.py` defines a subclass of `BaseEnv` (`env.py`), then `python my_env.py serve` does these steps:

1. `cli.py` parses the options (`config.py`) and makes the environment.
2. `serving.py: ServeLoop` registers with the trajectory service. It decides when to collect, pause, evaluate and end.
3. `collecting.py: Collector` runs many calls of `collect_trajectories` concurrently. They use a `ServerManager`
   (`server_manager.py`), which sends each request to the `APIServer` with the most free slots (`model_server.py`).
4. `groups.py` checks and converts each scored group. `serving.py: Membership` sends it to the service.
5. `metrics.py` computes metrics. `files.py` writes groups, checkpoints and evaluation results.
"""

from rlframe import extras

extras.require("BaseEnv", "trajectories", "envs")
with extras.explain_import_error("BaseEnv", "trajectories", "envs"):
    from rlframe.language.environments.config import (
        APIServerConfig,
        BaseEnvConfig,
        EvalHandlingEnum,
        OpenaiConfig,
        ReasoningConfig,
        ServerBaseline,
        ServerManagerConfig,
    )
    from rlframe.language.environments.env import BaseEnv
    from rlframe.language.environments.groups import (
        Item,
        Message,
        ScoredDataGroup,
        ScoredDataItem,
        number,
        tokenize_for_trainer,
    )
    from rlframe.language.environments.model_server import APIServer
    from rlframe.language.environments.server_manager import ManagedServer, SequenceNode, ServerManager

__all__ = [
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "ManagedServer",
    "Message",
    "OpenaiConfig",
    "ReasoningConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "SequenceNode",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "number",
    "tokenize_for_trainer",
]
