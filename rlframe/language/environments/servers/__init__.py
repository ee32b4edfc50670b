"""Model servers that speak the OpenAI API, and what environments ask them through."""

from rlframe.language.environments.servers.config import (
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    ServerManagerConfig,
)
from rlframe.language.environments.servers.managed import ManagedServer, SequenceNode
from rlframe.language.environments.servers.manager import ServerManager
from rlframe.language.environments.servers.server import APIServer

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
