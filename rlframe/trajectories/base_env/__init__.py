"""Environments of language models, under the names that published ones import."""

from rlframe import extras

extras.require("BaseEnv", "trajectories", "envs")
with extras.needed("BaseEnv", "trajectories", "envs"):
    from rlframe.trajectories.base_env.config import BaseEnvConfig, EvalHandlingEnum
    from rlframe.trajectories.base_env.env import BaseEnv
    from rlframe.trajectories.base_env.servers import (
        APIServer,
        APIServerConfig,
        OpenaiConfig,
        SequenceNode,
        ServerBaseline,
        ServerManager,
    )
    from rlframe.trajectories.base_env.tokens import tokenize_for_trainer
    from rlframe.trajectories.base_env.types import Item, Message, ScoredDataGroup, ScoredDataItem, number

__all__ = [
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "Message",
    "OpenaiConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "SequenceNode",
    "ServerBaseline",
    "ServerManager",
    "number",
    "tokenize_for_trainer",
]
