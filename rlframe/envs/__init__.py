"""Batched environments: `SyncEnv` steps all environments together; `AsyncEnv` steps each environment independently.

The calls of one step, in a pool of type "loop":

    pool = SyncEnv("CartPole-v1", 2)                # batch.py: create the pool; names.py: the name becomes a Builder
    timestep = pool.step(np.array([0, 1]))          # actions [2], in the framework's dtypes
      ActionCheck                                   # checks.py: check dtype, shape and range
      LoopPool.step -> EnvGroup.step                # group.py: step the environments, one after another
        Codec.decode                                # codec.py: convert the action to the environment's dtype
        GymnasiumEnv.step                           # adapters.py: return (observation, reward, discount, last)
        ObservationRows.write                       # codec.py: write to a row of a BatchBuffer (layout.py)
      FiniteCheck                                   # checks.py: reject NaN and infinity
      MaskCheck                                     # checks.py: reject an action mask without a legal action
      FrameStack                                    # wrappers.py: stack observations, if frame_stack > 1

Pools of the types "thread" (thread.py) and "process" (process.py, worker.py) have one `EnvGroup` in each thread or
worker process. EnvPool's environments run in C++ (envpool.py). An `EnvServer` (server.py) has a pool in another node,
and `RemoteEnv` (remote.py) calls this server. `as_pool` converts a user's environment or builder to a pool.
"""

from __future__ import annotations

from rlframe.envs.batch import AsyncEnv, SyncEnv, as_pool
from rlframe.envs.names import default_type, list_envs
from rlframe.envs.pool import AsyncEnvPool, EnvPool
from rlframe.envs.server import EnvServer

__all__ = ["AsyncEnv", "AsyncEnvPool", "EnvPool", "EnvServer", "SyncEnv", "as_pool", "default_type", "list_envs"]
