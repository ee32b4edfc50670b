"""Environments of language models, under the names that published environments import.

`python my_env.py serve`, with an environment that subclasses `BaseEnv` (`env.py`):

1. `cli.py` reads the options (`config.py`) and makes the environment.
2. `serving.py: ServeLoop` joins the trajectory service, and decides when to collect, pause, evaluate, and end.
3. `collecting.py: Collector` runs many `collect_trajectories` side by side. They ask a `ServerManager`
   (`server_manager.py`), which sends each request to the freest `APIServer` (`model_server.py`).
4. `groups.py` checks the scored group and packs it. `serving.py: Membership` sends it.
5. `metrics.py` counts, and `files.py` writes groups, checkpoints and evaluations.
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
