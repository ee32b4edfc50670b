"""The environments of a run, with their names and heartbeats, and sums over the live environments."""

from __future__ import annotations

import copy
import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec


@dataclass(kw_only=True)
class EnvSummary:
    """The fields of an environment that the live page shows.

    A live environment is connected, and its last heartbeat was at most `lapse_after` seconds ago.
    """

    env_id: int
    wandb_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None  # fraction from 0 to 1
    connected: bool = True
    live: bool = False
    added_groups: int = 0
    added_sequences: int = 0
    added_tokens: int = 0
    served_groups: int = 0
    served_sequences: int = 0


@dataclass(kw_only=True)
class Env(EnvSummary):
    """A registered environment."""

    desired_name: str
    resume_token: str | None
    max_token_length: int
    last_heard: float  # time of the last heartbeat, in seconds
    size_known: bool = True  # True if a registration or the first group has set the group size
    largest_group: int = 0  # sequences

    @property
    def scaled_weight(self) -> Fraction:
        """The weight multiplied by `max_token_length`. It is a fraction, so that sums have no rounding error."""
        return self.max_token_length * Fraction(max(0.0, self.weight))

    def count_added(self, sequences: int, tokens: int) -> None:
        self.added_groups += 1
        self.added_sequences += sequences
        self.added_tokens += tokens
        self.largest_group = max(self.largest_group, sequences)


class Environments:
    """All environments of one epoch. Ids count from 0.

    Attributes:
        sizes: Number of live environments for each group size.
        with_minimum_share: Ids of the live environments with a minimum allocation.
    """

    def __init__(self) -> None:
        self.all: list[Env] = []
        self.sizes: Counter[int] = Counter()
        self.with_minimum_share: dict[int, None] = {}
        self._by_token: dict[str, int] = {}
        self._names: Counter[str] = Counter()
        self._heard: OrderedDict[int, None] = OrderedDict()  # live environments, earliest heartbeat first
        self._total_weight = Fraction(0)
        self._allocated = Fraction(0)

    def get(self, env_id: int | None) -> Env | None:
        return self.all[env_id] if env_id is not None and 0 <= env_id < len(self.all) else None

    def find_by_token(self, resume_token: str | None) -> Env | None:
        env_id = None if resume_token is None else self._by_token.get(resume_token)
        return self.get(env_id)

    def register(self, known: Env | None, token: str | None, group_size: int | None, **values: Any) -> Env:
        """Add a new environment, or update `known`, which is not live. Later, `record_heartbeat` makes it live.

        A `group_size` of None keeps the group size of `known`. For a new environment, None means 1 until the first
        group.
        """
        if group_size is not None or known is None:
            values |= {"group_size": group_size or 1, "size_known": group_size is not None}
        if known is not None:
            env = known
            for field, value in values.items():
                setattr(env, field, value)
            env.connected = True
        else:
            name = values["desired_name"]
            env = Env(env_id=len(self.all), wandb_name=f"{name}_{self._names[name]}", resume_token=token, **values)
            self._names[name] += 1
            self.all.append(env)
            if token is not None:
                self._by_token[token] = env.env_id
        env.largest_group = max(env.largest_group, env.group_size)
        return env

    def record_heartbeat(self, env: Env, now: float) -> bool:
        """Record a heartbeat. Return True if the environment became live. A disconnected environment stays not live."""
        env.last_heard = now
        if not env.connected:
            return False
        self._heard[env.env_id] = None
        self._heard.move_to_end(env.env_id)
        if env.live:
            return False
        env.live = True
        self._sum(env, 1)
        return True

    def mark_not_live(self, env: Env) -> None:
        if env.live:
            env.live = False
            del self._heard[env.env_id]
            self._sum(env, -1)

    def overdue(self, heard_before: float) -> Env | None:
        """Return the live environment with the earliest heartbeat, or None if this is not before `heard_before`."""
        env = self.all[next(iter(self._heard))] if self._heard else None
        return env if env is not None and env.last_heard < heard_before else None

    def latest(self, count: int) -> list[Env]:
        """Return at most `count` environments. Live ones come first. Then the order is by heartbeat, latest first."""
        return heapq.nlargest(count, self.all, key=lambda env: (env.live, env.last_heard))

    def weight_of(self, env: Env | None) -> float:
        """Return the environment's fraction of the total scaled weight of all live environments, at least 0.01.

        None stands for unregistered senders, whose fraction is 0.01.
        """
        return (
            min(1.0, max(0.01, float(env.scaled_weight / self._total_weight)))
            if self._total_weight and env is not None
            else 0.01
        )

    @property
    def num_live(self) -> int:
        return len(self._heard)

    @property
    def unallocated_fraction(self) -> float:
        return float(1 - min(self._allocated, Fraction(1)))

    def to_state(self) -> list[Any]:
        return [[copy.copy(env) for env in self.all], list(self._heard)]

    @classmethod
    def from_state(cls, state: list[Any]) -> Environments:
        envs = cls()
        envs.all = msgspec.convert(state[0], list[Env])
        for env in envs.all:
            envs._names[env.wandb_name.rpartition("_")[0]] += 1  # later, the environment can desire another name
            if env.resume_token is not None:
                envs._by_token[env.resume_token] = env.env_id
            if env.live:
                envs._sum(env, 1)
        envs._heard = OrderedDict.fromkeys(state[1])
        return envs

    def _sum(self, env: Env, sign: int) -> None:
        self._total_weight += sign * env.scaled_weight
        self.sizes += Counter({env.group_size: sign})  # this operator removes counts of 0
        if env.min_batch_allocation:
            self._allocated += sign * Fraction(env.min_batch_allocation)
            if sign > 0:
                self.with_minimum_share[env.env_id] = None
            else:
                del self.with_minimum_share[env.env_id]
