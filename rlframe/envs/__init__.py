"""Environments as batches: `SyncEnv` steps all of them together, `AsyncEnv` whichever are ready."""

from __future__ import annotations

from rlframe.envs.asynchronous import AsyncEnv
from rlframe.envs.names import default_type, list_envs
from rlframe.envs.pool import AsyncEnvPool, EnvPool
from rlframe.envs.server import EnvServer
from rlframe.envs.sync import SyncEnv, as_pool

__all__ = ["AsyncEnv", "AsyncEnvPool", "EnvPool", "EnvServer", "SyncEnv", "as_pool", "default_type", "list_envs"]
