"""Clients of `EnvServer`: pools whose environments run in other processes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlframe import handles, retry
from rlframe.errors import UsageError
from rlframe.metrics.rows import Sums, add_sums
from rlframe.types import TimeStep, Tree


class ServedSpecs(NamedTuple):
    """The result of `EnvServer.specs`. Its two specs are None if the pool is a user's pool without specs."""

    num_envs: int
    observation_spec: Tree
    action_spec: Any
    wait_num: int | None = None  # `wait_num` of an asynchronous pool; None for a synchronous pool


class ServedStep(NamedTuple):
    """The result of a step of an `EnvServer`."""

    timestep: TimeStep
    sums: Sums | None  # the pool's `sums` if an episode ended in this step, else None
    true_rewards: np.ndarray | None  # [B] unclipped rewards if the pool clips rewards, else None
    env_ids: np.ndarray | None = None  # [B] int32 for an asynchronous pool, else None


class RemoteEnv:
    """An `EnvPool` with the environments of an `EnvServer`. Each call has a number: the server detects repeated calls.

    Args:
        server: handle to the server.
        specs: the result of the server's method `specs`.

    Raises (every method):
        EnvError: an environment raised, the server was restarted, or another Actor has reset its environments.
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
        """See `SyncEnv.sums`. The sums are updated only when an episode ends."""
        return self._sums

    def _call(self, method: str, *args: Any) -> TimeStep:
        self._number += 1
        timestep, sums, self.true_rewards, _ = getattr(self._server, method)(self._client, self._number, *args)
        self._sums = self._sums if sums is None else sums
        return timestep


_POLL_INTERVAL, _MAX_POLL_INTERVAL = 0.0001, 0.002  # shortest and longest seconds between two checks for an answer


class RemoteAsyncEnv:
    """An `AsyncEnvPool` with the environments of one or several `EnvServer`s. Each server has an `AsyncEnv`.

    The ids of the second server's environments follow those of the first server. Each `recv` returns the timestep of
    the first server that has answered.

    Args:
        servers: (handle, result of `specs`) of each server.

    Raises (every method):
        EnvError: an environment raised, a server was restarted, or another Actor has reset its environments.
        PeerError: a server did not answer within the deadline.
        UsageError: an action is invalid, or an observation does not fit its spec. The client may already have sent
            actions to other servers.
    """

    def __init__(self, servers: Sequence[tuple[handles.Remote, ServedSpecs]]) -> None:
        specs = [each for _, each in servers]
        if any(each.wait_num is None for each in specs):
            raise UsageError(
                "One Actor can use several EnvServers only if each serves an AsyncEnv, but some of these serve a "
                "SyncEnv. Create one Actor for each of them."
            )
        if len({(repr(each.observation_spec), repr(each.action_spec), each.wait_num) for each in specs}) > 1:
            raise UsageError(f"The EnvServers of one Actor must have equal specs and wait_num, got {specs}.")
        assert specs[0].wait_num is not None
        self.wait_num = specs[0].wait_num
        self.observation_spec, self.action_spec = specs[0].observation_spec, specs[0].action_spec
        self.num_envs = sum(each.num_envs for each in specs)
        self.true_rewards: np.ndarray | None = None  # [wait_num] unclipped rewards of the newest timestep
        self._servers: list[_ServerConnection] = []
        for remote, pool_specs in servers:
            first = self._servers[-1].end if self._servers else 0
            self._servers.append(_ServerConnection(remote, first, first + pool_specs.num_envs))
        self._idle: set[int] = set()  # ids that `recv` has returned and that have no action yet
        self._started = False

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """See `AsyncEnvPool`. The first calls return the FIRST timestep of every environment."""
        if not self._started:
            for server in self._servers:
                server.start()
            self._started = True
        for server in self._servers:
            if server.running >= self.wait_num:
                server.request()
        requested = [server for server in self._servers if server.call is not None]
        if not requested:
            raise UsageError(
                f"recv() waits for {self.wait_num} environments of one server, but each server is stepping fewer "
                "environments: call send() for the received environments first."
            )
        server = requested[0] if len(requested) == 1 else self._wait_for_first(requested)
        served = server.take()
        assert served.env_ids is not None
        env_ids = served.env_ids + np.int32(server.first)
        self._idle.update(env_ids.tolist())
        self._servers.remove(server)  # move the server to the end, so that a fast server does not delay slow servers
        self._servers.append(server)
        self.true_rewards = served.true_rewards
        return env_ids, served.timestep

    def send(self, env_ids: Any, actions: Any) -> None:
        """See `AsyncEnvPool`."""
        env_ids, actions = np.asarray(env_ids), np.asarray(actions)
        ids = env_ids.tolist() if env_ids.ndim == 1 and env_ids.dtype.kind in "iu" else None
        if ids is None or actions.shape[:1] != env_ids.shape:
            raise UsageError(
                "send() requires 'env_ids' [n] and an action for each of them, 'actions' [n, ...]; got ids of shape "
                f"{env_ids.shape} ({env_ids.dtype}) and actions of shape {actions.shape}."
            )
        wrong = sorted(set(ids) - self._idle) or [one for one in ids if ids.count(one) > 1]
        if wrong:
            raise UsageError(
                f"send() to environment {wrong[0]}, which is still stepping, unknown or listed twice: expected "
                f"different ids from 0 to {self.num_envs - 1} that recv() has returned since their last action."
            )
        for server in self._servers:
            mine = (env_ids >= server.first) & (env_ids < server.end)
            if mine.any():
                server.send((env_ids[mine] - server.first).astype(np.int32), actions[mine])
                self._idle -= set(env_ids[mine].tolist())

    def sums(self) -> Sums:
        """See `SyncEnv.sums`. The sums of a server are updated only when one of its episodes ends."""
        return add_sums(server.sums for server in self._servers)

    def _wait_for_first(self, requested: list[_ServerConnection]) -> _ServerConnection:
        """Wait until a server has answered or has missed its deadline, and return this server."""
        pauses = retry.backoff(_POLL_INTERVAL, _MAX_POLL_INTERVAL)
        while True:
            for server in requested:
                if server.has_answered():
                    return server
            time.sleep(next(pauses))


class _ServerConnection:
    """The connection to one server. Each call has a number: the server detects repeated calls."""

    def __init__(self, remote: handles.Remote, first: int, end: int) -> None:
        self._remote, self._client, self._number = remote, uuid.uuid4().hex, 0
        self.first, self.end = first, end  # the server's environments have the ids first .. end - 1
        self.running = end - first  # number of environments that are stepping
        self.call: handles.AsyncCall | None = None
        self.sums: Sums = {}
        self._answer: ServedStep | None = None
        self._requested_at = 0.0

    def start(self) -> None:
        self._number += 1
        self._remote.reset(self._client, self._number)

    def request(self) -> None:
        """Call `recv` of the server. Do nothing if a call of `recv` has no answer yet."""
        if self.call is None:
            self._number += 1
            self._requested_at = time.monotonic()
            self.call = handles.AsyncCall(self._remote, "recv", (self._client, self._number))

    def has_answered(self) -> bool:
        """Return True if the server has answered or has missed its deadline. In both cases `take` does not wait."""
        assert self.call is not None
        late = time.monotonic() > self._requested_at + self._remote._deadline
        return self._answer is not None or self.call.done() or late

    def take(self) -> ServedStep:
        """Return the result of the call that `request` has started. Raise the server's error."""
        served = self._wait_for_result()
        self.call = self._answer = None
        self.running -= len(served.timestep.step_type)
        self.sums = self.sums if served.sums is None else served.sums
        return served

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        if self.call is not None:
            self._wait_for_result()  # wait, because the server must receive the calls in the order of their numbers
        self._number += 1
        self._remote.send(self._client, self._number, env_ids, actions)
        self.running += len(env_ids)

    def _wait_for_result(self) -> ServedStep:
        assert self.call is not None
        if self._answer is None:
            self._answer = ServedStep(*self.call.result())
        return self._answer
