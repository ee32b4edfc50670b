"""The environments of a run: names, who is alive, and sums over those that are."""

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
    """What anybody may know of an environment. Live: connected, and heard of within the last `lapse_after` seconds."""

    env_id: int
    wandb_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None  # 0 to 1
    connected: bool = True
    live: bool = False
    added_groups: int = 0
    added_sequences: int = 0
    added_tokens: int = 0
    served_groups: int = 0
    served_sequences: int = 0


@dataclass(kw_only=True)
class Env(EnvSummary):
    """One environment that registered."""

    desired_name: str
    resume_token: str | None
    max_token_length: int
    last_heard: float  # seconds
    size_known: bool = True  # whether it, or its first group, has said its group size
    largest_group: int = 0  # sequences

    @property
    def pull(self) -> Fraction:
        """What its weight is a part of: context length times weight. Exact, so that sums can be kept by difference."""
        return self.max_token_length * Fraction(max(0.0, self.weight))

    def count_added(self, sequences: int, tokens: int) -> None:
        self.added_groups += 1
        self.added_sequences += sequences
        self.added_tokens += tokens
        self.largest_group = max(self.largest_group, sequences)


class Environments:
    """All environments of one epoch; ids count from 0.

    Attributes:
        sizes: how many live environments have each group size.
        sharing: ids of the live environments with a minimum allocation.
    """

    def __init__(self) -> None:
        self.all: list[Env] = []
        self.sizes: Counter[int] = Counter()
        self.sharing: dict[int, None] = {}
        self._by_token: dict[str, int] = {}
        self._names: Counter[str] = Counter()
        self._heard: OrderedDict[int, None] = OrderedDict()  # live ones, that heard of longest ago first
        self._pull = Fraction(0)
        self._allocated = Fraction(0)

    def get(self, env_id: int | None) -> Env | None:
        return self.all[env_id] if env_id is not None and 0 <= env_id < len(self.all) else None

    def known(self, resume_token: str | None) -> Env | None:
        env_id = None if resume_token is None else self._by_token.get(resume_token)
        return self.get(env_id)

    def register(self, known: Env | None, token: str | None, group_size: int | None, **told: Any) -> Env:
        """A new environment, or `known`, which has left, with what it tells now. Live when it is heard.

        `group_size` None: as it was, or 1 until its first group.
        """
        if group_size is not None or known is None:
            told |= {"group_size": group_size or 1, "size_known": group_size is not None}
        if known is not None:
            env = known
            for field, value in told.items():
                setattr(env, field, value)
            env.connected = True
        else:
            name = told["desired_name"]
            env = Env(env_id=len(self.all), wandb_name=f"{name}_{self._names[name]}", resume_token=token, **told)
            self._names[name] += 1
            self.all.append(env)
            if token is not None:
                self._by_token[token] = env.env_id
        env.largest_group = max(env.largest_group, env.group_size)
        return env

    def hear(self, env: Env, now: float) -> bool:
        """Note a sign of life. Returns whether the environment became live by it; a disconnected one does not."""
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

    def leave(self, env: Env) -> None:
        """The environment is no longer live."""
        if env.live:
            env.live = False
            del self._heard[env.env_id]
            self._sum(env, -1)

    def overdue(self, heard_before: float) -> Env | None:
        """The live environment that was heard of longest ago, if that was before `heard_before`."""
        env = self.all[next(iter(self._heard))] if self._heard else None
        return env if env is not None and env.last_heard < heard_before else None

    def latest(self, count: int) -> list[Env]:
        """At most so many: the live ones first, those that were heard of last first."""
        return heapq.nlargest(count, self.all, key=lambda env: (env.live, env.last_heard))

    def weight_of(self, env: Env | None) -> float:
        """The part of the live environments' weights that is this one's, at least 0.01; None: of unknown senders."""
        return min(1.0, max(0.01, float(env.pull / self._pull))) if self._pull and env is not None else 0.01

    @property
    def live(self) -> int:
        """How many are."""
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
            envs._names[env.desired_name] += 1
            if env.resume_token is not None:
                envs._by_token[env.resume_token] = env.env_id
            if env.live:
                envs._sum(env, 1)
        envs._heard = OrderedDict.fromkeys(state[1])
        return envs

    def _sum(self, env: Env, sign: int) -> None:
        self._pull += sign * env.pull
        self.sizes[env.group_size] += sign
        if not self.sizes[env.group_size]:
            del self.sizes[env.group_size]
        if env.min_batch_allocation:
            self._allocated += sign * Fraction(env.min_batch_allocation)
            if sign > 0:
                self.sharing[env.env_id] = None
            else:
                del self.sharing[env.env_id]
