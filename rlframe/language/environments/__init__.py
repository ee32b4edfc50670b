"""Environments of language models, under the names that published environments import."""

from rlframe import extras

extras.require("BaseEnv", "trajectories", "envs")
with extras.needed("BaseEnv", "trajectories", "envs"):
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
