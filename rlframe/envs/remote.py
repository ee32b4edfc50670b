"""Environments of another process, as a pool that an Actor steps."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import numpy as np

from rlframe import handles
from rlframe.metrics.sums import Sums
from rlframe.types import TimeStep, Tree


class ServedSpecs(NamedTuple):
    """What an `EnvServer` says of its pool; the specs are None where a pool of a user's has none."""

    num_envs: int
    observation_spec: Tree
    action_spec: Any
    wait_num: int | None = None  # of an asynchronous pool


class ServedStep(NamedTuple):
    """What an `EnvServer` answers: the timestep, and where an episode ended what the environments have logged."""

    timestep: TimeStep
    sums: Sums | None
    true_rewards: np.ndarray | None  # [B], where the pool clips rewards
    env_ids: np.ndarray | None = None  # [B] int32, of an asynchronous pool


class RemoteEnv:
    """The `EnvPool` behind an `EnvServer`. Each call has a number, by which the server knows one that is repeated.

    Args:
        server: where it is.
        specs: what it says of its pool.

    Raises (every method):
        EnvError: an environment raised, or the server was restarted, or another Actor steps its environments now.
        PeerError: the server did not answer within the deadline.
    """

    def __init__(self, server: handles.Remote, specs: ServedSpecs) -> None:
        self._server = server
        self._client, self._number = uuid.uuid4().hex, 0
        self._sums: Sums = {}
        self.true_rewards: np.ndarray | None = None
        self.num_envs, self.observation_spec, self.action_spec, _ = specs

    def reset(self) -> TimeStep:
        """See `EnvPool`."""
        return self._call("reset")

    def step(self, actions: np.ndarray) -> TimeStep:
        """See `EnvPool`."""
        return self._call("step", actions)

    def sums(self) -> Sums:
        """See `SyncEnv.sums`; up to the last end of an episode."""
        return self._sums

    def _call(self, method: str, *args: Any) -> TimeStep:
        self._number += 1
        timestep, sums, self.true_rewards, _ = getattr(self._server, method)(self._client, self._number, *args)
        self._sums = self._sums if sums is None else sums
        return timestep
