"""Environments of language models, under the names that published ones import."""

from rlframe import extras

extras.require("BaseEnv", "trajectories", "envs")
with extras.needed("BaseEnv", "trajectories", "envs"):
    from rlframe.language.environments.config import BaseEnvConfig, EvalHandlingEnum
    from rlframe.language.environments.env import BaseEnv
    from rlframe.language.environments.servers import (
        APIServer,
        APIServerConfig,
        ManagedServer,
        OpenaiConfig,
        ReasoningConfig,
        SequenceNode,
        ServerBaseline,
        ServerManager,
        ServerManagerConfig,
    )
    from rlframe.language.environments.tokens import tokenize_for_trainer
    from rlframe.language.environments.types import Item, Message, ScoredDataGroup, ScoredDataItem, number

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
