"""Environments of other processes as a pool that an Actor steps: the client side of `EnvServer`."""

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


_POLL_INTERVAL, _MAX_POLL_INTERVAL = 0.0001, 0.002  # seconds between two looks at which of several servers has answered


class RemoteAsyncEnv:
    """The environments of one `EnvServer` of an `AsyncEnv`, or of several, as one pool: the first to answer goes first.

    Environments of the second server come after those of the first. Each `recv` is the answer of one server.

    Args:
        servers: where they are, with what each says of its pool.

    Raises (every method):
        EnvError: an environment raised, or a server was restarted, or another Actor has its environments now.
        PeerError: a server did not answer within the deadline.
        UsageError: an action or an answer does not fit. The actions for other servers may have been sent.
    """

    def __init__(self, servers: Sequence[tuple[handles.Remote, ServedSpecs]]) -> None:
        specs = [told for _, told in servers]
        if any(told.wait_num is None for told in specs):
            raise UsageError(
                "Several EnvServers can be one Actor's only if each serves an AsyncEnv; some of these serve a SyncEnv. "
                "Make an Actor for each of them."
            )
        if len({(repr(told.observation_spec), repr(told.action_spec), told.wait_num) for told in specs}) > 1:
            raise UsageError(f"The EnvServers of one Actor must have equal specs and wait_num; these have {specs}.")
        assert specs[0].wait_num is not None
        self.wait_num = specs[0].wait_num
        self.observation_spec, self.action_spec = specs[0].observation_spec, specs[0].action_spec
        self.num_envs = sum(told.num_envs for told in specs)
        self.true_rewards: np.ndarray | None = None  # [wait_num] of the newest timestep, where the pools clip rewards
        self._servers: list[_Server] = []
        for remote, told in servers:
            first = self._servers[-1].end if self._servers else 0
            self._servers.append(_Server(remote, first, first + told.num_envs))
        self._idle: set[int] = set()  # received, but not sent to since
        self._started = False

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """See `AsyncEnvPool`. The first answers are the FIRST timesteps of all environments."""
        if not self._started:
            for server in self._servers:
                server.start()
            self._started = True
        for server in self._servers:
            if server.running >= self.wait_num:
                server.ask()
        asked = [server for server in self._servers if server.call is not None]
        if not asked:
            raise UsageError(
                f"recv() waits for {self.wait_num} environments of one server, but none has so many that were sent an "
                "action and not received since: send() to those that were received first."
            )
        server = asked[0] if len(asked) == 1 else self._first_of(asked)
        served = server.take()
        assert served.env_ids is not None
        env_ids = served.env_ids + np.int32(server.first)
        self._idle.update(env_ids.tolist())
        self._servers.remove(server)  # it is asked last the next time, so that a quick one does not hide the others
        self._servers.append(server)
        self.true_rewards = served.true_rewards
        return env_ids, served.timestep

    def send(self, env_ids: Any, actions: Any) -> None:
        """See `AsyncEnvPool`."""
        env_ids, actions = np.asarray(env_ids), np.asarray(actions)
        ids = env_ids.tolist() if env_ids.ndim == 1 and env_ids.dtype.kind in "iu" else None
        if ids is None or actions.shape[:1] != env_ids.shape:
            raise UsageError(
                "send() takes 'env_ids' [n] and an action for each of them, 'actions' [n, ...]; got ids of shape "
                f"{env_ids.shape} ({env_ids.dtype}) and actions of shape {actions.shape}."
            )
        wrong = sorted(set(ids) - self._idle) or [one for one in ids if ids.count(one) > 1]
        if wrong:
            raise UsageError(
                f"send() to environment {wrong[0]}, which was not received since its last action, or is named twice: "
                f"each of 0 to {self.num_envs - 1} is received before it is sent an action."
            )
        for server in self._servers:
            mine = (env_ids >= server.first) & (env_ids < server.end)
            if mine.any():
                server.send((env_ids[mine] - server.first).astype(np.int32), actions[mine])
                self._idle -= set(env_ids[mine].tolist())

    def sums(self) -> Sums:
        """See `SyncEnv.sums`; up to the last end of an episode."""
        return add_sums(server.sums for server in self._servers)

    def _first_of(self, asked: list[_Server]) -> _Server:
        """Wait for an answer. A server beyond its deadline counts as one, so that it is named."""
        looks = retry.backoff(_POLL_INTERVAL, _MAX_POLL_INTERVAL)
        while True:
            for server in asked:
                if server.has_answered():
                    return server
            time.sleep(next(looks))


class _Server:
    """One server. Each call has a number, by which the server knows one that is repeated."""

    def __init__(self, remote: handles.Remote, first: int, end: int) -> None:
        self._remote, self._client, self._number = remote, uuid.uuid4().hex, 0
        self.first, self.end = first, end  # its environments, among all
        self.running = end - first  # environments that have something to do, beside those that `call` asks for
        self.call: handles.AsyncCall | None = None
        self.sums: Sums = {}
        self._answer: ServedStep | None = None
        self._asked_at = 0.0

    def start(self) -> None:
        self._number += 1
        self._remote.reset(self._client, self._number)

    def ask(self) -> None:
        """Ask for environments that are ready, unless that was done."""
        if self.call is None:
            self._number += 1
            self._asked_at = time.monotonic()
            self.call = handles.AsyncCall(self._remote, "recv", (self._client, self._number))

    def has_answered(self) -> bool:
        """Return True if the answer is here or overdue: `take` does not wait then."""
        assert self.call is not None
        late = time.monotonic() > self._asked_at + self._remote._deadline
        return self._answer is not None or self.call.done() or late

    def take(self) -> ServedStep:
        """The answer to `ask`."""
        served = self._settle()
        self.call = self._answer = None
        self.running -= len(served.timestep.step_type)
        self.sums = self.sums if served.sums is None else served.sums
        return served

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        if self.call is not None:
            self._settle()  # calls arrive in the order of their numbers
        self._number += 1
        self._remote.send(self._client, self._number, env_ids, actions)
        self.running += len(env_ids)

    def _settle(self) -> ServedStep:
        assert self.call is not None
        if self._answer is None:
            self._answer = ServedStep(*self.call.result())
        return self._answer
