"""Environments as batches: `SyncEnv` steps all of them together, `AsyncEnv` whichever are ready.

The path of one step, in a pool of type "loop":

    pool = SyncEnv("CartPole-v1", 2)                # batch.py; the name becomes a Builder (names.py)
    timestep = pool.step(np.array([0, 1]))          # actions [2], in the framework's types
      ActionCheck                                   # checks.py: their dtype, shape and range
      LoopPool.step -> EnvGroup.step                # group.py: the environments, one after another
        Codec.decode                                # codec.py: an action in the environment's types
        GymnasiumEnv.step                           # adapters.py: (observation, reward, discount, last)
        ObservationRows.write                       # codec.py: into a row of a Frame (layout.py)
      FiniteCheck                                   # checks.py: no NaN, no infinity
      FrameStack                                    # wrappers.py, if observations are stacked

The other types have an `EnvGroup` in each thread (thread.py) or worker process (process.py, worker.py). EnvPool's
environments are C++ (envpool.py). An `EnvServer` (server.py) has a pool in another node, and `RemoteEnv` (remote.py)
calls it. `as_pool` makes a pool of whatever a user gives.
"""

from __future__ import annotations

from rlframe.envs.batch import AsyncEnv, SyncEnv, as_pool
from rlframe.envs.names import default_type, list_envs
from rlframe.envs.pool import AsyncEnvPool, EnvPool
from rlframe.envs.server import EnvServer

__all__ = ["AsyncEnv", "AsyncEnvPool", "EnvPool", "EnvServer", "SyncEnv", "as_pool", "default_type", "list_envs"]
