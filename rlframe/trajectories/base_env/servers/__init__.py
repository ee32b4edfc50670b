"""Model servers that speak the OpenAI API, and what environments ask them through."""

from rlframe.trajectories.base_env.servers.config import (
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    ServerManagerConfig,
)
from rlframe.trajectories.base_env.servers.managed import ManagedServer, SequenceNode
from rlframe.trajectories.base_env.servers.manager import ServerManager
from rlframe.trajectories.base_env.servers.server import APIServer

__all__ = [
    "APIServer",
    "APIServerConfig",
    "ManagedServer",
    "OpenaiConfig",
    "ReasoningConfig",
    "SequenceNode",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
]
