"""The tables of a Reverb server: the tables of an agent's items, and tables for the ranks of writers, their numbers of
environments, and the highest priority.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from rlframe import retry
from rlframe.errors import PeerError, UsageError
from rlframe.replay.rate_limiter import RateLimiter, items_kept
from rlframe.replay.reverb.connection import CLAIMS, HIGHEST, REPLAY, ReverbConnection, ReverbInserter, import_reverb
from rlframe.replay.reverb.item_bytes import ItemRows
from rlframe.types import AgentSpecs

CLAIM_FIELDS = 5  # number of int64 fields in an entry of the table CLAIMS (see `RankRegistry`)
_CLAIMS_KEPT = 1 << 20


@dataclasses.dataclass(frozen=True)
class ReverbTables:
    """Creates the tables of a server. Call the object or iterate over it to get the tables.

    The object can be pickled without Reverb, so that only the server's node needs Reverb.

    See `ReverbReplayBuffer.tables`.
    """

    agent: AgentSpecs
    block: int
    when_full: Literal["wait", "drop"]
    run_ahead: int

    def __post_init__(self) -> None:
        kind = self.agent.replay_spec.kind
        if self.block < 1:
            raise UsageError(f"A block needs at least one item, got block={self.block}.")
        if self.block > 1 and kind != "queue":
            raise UsageError(
                f"Only queues can have blocks. A {kind} replay draws single items. Leave block={self.block} out."
            )
        if self.when_full not in ("wait", "drop"):
            raise UsageError(f"when_full must be 'wait' or 'drop', got {self.when_full!r}.")
        if kind == "queue" and self.agent.replay_spec.samples_per_insert is not None:
            raise UsageError(
                "A queue returns each item once, so samples_per_insert must be None; "
                f"got {self.agent.replay_spec.samples_per_insert:g}. The option when_full determines if writers wait."
            )

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    def __call__(self) -> list[Any]:
        """Return new `reverb.Table`s for items, for claims of ranks, and for the highest priority."""
        reverb, tf = import_reverb()
        selectors, limiters = reverb.selectors, reverb.rate_limiters
        spec, rows = self.agent.replay_spec, ItemRows(self.agent)
        sampler = {
            "uniform": selectors.Uniform,
            "prioritized": lambda: selectors.Prioritized(spec.priority_exponent),
            "queue": selectors.Fifo,
        }[spec.kind]()
        # The name of the signature describes the fields of a row. Each client checks that it expects the same fields.
        signature = {"rows": tf.TensorSpec((self.block, rows.nbytes), tf.uint8, name=rows.description)}
        items = reverb.Table(
            REPLAY,
            sampler=sampler,
            remover=selectors.Fifo(),
            max_size=-(-items_kept(spec) // self.block),
            rate_limiter=self._limiter(limiters),
            max_times_sampled=1 if spec.kind == "queue" else 0,
            signature=signature,
        )
        claim = {"claim": tf.TensorSpec((CLAIM_FIELDS,), tf.int64)}
        one = limiters.MinSize(1)
        claims = reverb.Table(CLAIMS, selectors.Uniform(), selectors.Fifo(), _CLAIMS_KEPT, one, signature=claim)
        value = {"priority": tf.TensorSpec((1,), tf.float64)}
        highest_priority = reverb.Table(
            HIGHEST, selectors.Fifo(), selectors.Fifo(), 1, limiters.MinSize(1), signature=value
        )
        return [items, claims, highest_priority]

    def _limiter(self, limiters: Any) -> Any:
        """Return the rate limiter of the table of items.

        The number of items in a full queue follows from the capacity. In a run, `makers.replay_capacity` replaces the
        capacity of the agent's `replay_spec`. Writers of a full queue wait, unless `when_full` is "drop". A run never
        drops.

        `run_ahead` is how many items inserts may run ahead of samples. In a run, `makers.add_reverb` computes it with
        `items_of_rounds`. In your own program, `ReverbReplayBuffer.tables` uses `default_run_ahead`.

        With the topology elastic, the number of actors changes. So `elastic_nodes.add_elastic_replay` computes capacity
        and rounds for the maximum number of actors.
        """
        spec = self.agent.replay_spec
        if spec.kind == "queue":
            size = -(-items_kept(spec) // self.block)
            return limiters.Queue(size) if self.when_full == "wait" else limiters.MinSize(1)
        if spec.samples_per_insert is None:
            return limiters.MinSize(spec.min_size)
        ratio = spec.samples_per_insert
        bounds = RateLimiter(spec).reverb_bounds(spec.batch_size or 1, self.run_ahead)
        return limiters.SampleToInsertRatio(ratio, spec.min_size, bounds)


def inserted(table: Any) -> int:
    """Return the total number of rows (items, or blocks of a queue) that were inserted into a table so far."""
    return table.rate_limiter_info.insert_stats.completed


def may_sample(table: Any, count: int) -> bool:
    """Return True if the rate limiter of a table allows a reader to sample `count` items now."""
    limiter = table.rate_limiter_info
    ahead = limiter.insert_stats.completed * limiter.samples_per_insert - limiter.sample_stats.completed - count
    return table.current_size >= limiter.min_size_to_sample and ahead >= limiter.min_diff


def block_size(signature: Any, rows: ItemRows, address: str) -> int:
    """Return the number of items per block of a table. `signature` is the table's signature, or None without a table.

    Raises:
        UsageError: there is no table, or its items do not match `rows`.
    """
    if signature is None or not (signature.name or "").startswith("{"):
        raise UsageError(
            f"The Reverb server at {address} has no table of rlframe. "
            "Make the server's tables with ReverbReplayBuffer.tables(agent)."
        )
    if signature.name != rows.description:
        there, here = json.loads(signature.name), json.loads(rows.description)
        differs = next(name for name in here if here[name] != there.get(name))
        raise UsageError(
            f"The Reverb server at {address} has the items of another agent: {differs} is {there.get(differs)} "
            f"there, {here[differs]} here. Make the server's tables from the same agent."
        )
    return int(signature.shape[0])


# Values of the field `kind` of an entry. An entry is (rank, incarnation, token, kind, number of environments).
_CLAIMED, _WITHDRAWN, _OPENED = 0, 1, 2
_READ_AHEAD = 64


class RankRegistry:
    """The ranks of all writers, each writer's number of environments, and the highest priority so far.

    Reverb has no compare-and-swap operation. So writers claim ranks in a log that only grows (the table of claims). A
    writer appends its claim and then reads the whole log. The writer gets the rank if the log has no other valid claim
    of this rank. If two writers claim the same rank at the same time, at least one of them sees both claims, because
    writers write before they read. A writer that sees another claim withdraws its claim, and retries after a random
    time. So two writers never have the same (rank, incarnation), even if many processes start together or die during a
    claim.

    Args:
        connection: the connection to the server.
        patience: seconds after which an unsuccessful claim raises an error.
    """

    def __init__(self, connection: ReverbConnection, patience: float) -> None:
        self._connection, self._patience = connection, patience
        self._random = random.Random()  # without a seed, because tokens must differ between processes
        self._lock = threading.RLock()
        self._own_entries: dict[tuple[int, int], list[list[int]]] = {}  # entries that this process wrote
        # Requested rank (or None) -> ((rank, incarnation), token) of the claim.
        self._pending_claims: dict[int | None, tuple[tuple[int, int], int]] = {}
        self._counters: list[int] = []
        self._envs: tuple[int, dict[int, int]] = (-1, {})  # (entries at the last read, rank -> environments)
        self._highest = (-1, 1.0)  # (inserted priorities at the last read, highest priority)

    def claim(self, rank: int | None) -> tuple[int, int]:
        """Claim a rank, and return (rank, incarnation). No other writer gets the same result.

        If a claim failed because the server was unreachable, call this method again to continue the claim.
        """
        pauses = retry.backoff(0.05, 2.0, self._patience, since=time.monotonic(), jitter=1.0)
        with self._lock:
            while True:
                claims = self._valid_claims()
                if rank not in self._pending_claims:
                    if rank is None:
                        held = {r for (r, _), tokens in claims.items() if tokens}
                        chosen = next(r for r in range(len(held) + 1) if r not in held), 0
                    else:
                        chosen = rank, 1 + max((i for r, i in claims if r == rank), default=-1)
                    token = self._random.getrandbits(62)
                    self._pending_claims[rank] = chosen, token
                    self._append([*chosen, token, _CLAIMED, 0])
                    claims = self._valid_claims()
                chosen, token = self._pending_claims.pop(rank)
                if claims.get(chosen) == {token}:
                    self._own_entries[chosen] = [[*chosen, token, _CLAIMED, 0]]
                    return chosen
                self._append([*chosen, token, _WITHDRAWN, 0])
                pause = next(pauses, None)
                if pause is None:
                    raise PeerError(
                        f"No rank could be claimed at {self._connection.address} for {self._patience:g} s: "
                        "other writers claimed the same rank each time. Pass a rank to each actor."
                    )
                time.sleep(pause)

    def open(self, rank: int, incarnation: int, num_envs: int) -> None:
        """Append the number of environments of a writer to the log."""
        with self._lock:
            entry = [rank, incarnation, 0, _OPENED, num_envs]
            if entry not in self._own_entries[rank, incarnation]:
                self._own_entries[rank, incarnation].append(entry)
            self._append(entry)

    def restore_lost_entries(self, tables: dict[str, Any]) -> None:
        """If the server's counters show that it has lost entries, append the entries of this process again.

        Args:
            tables: the server's current `TableInfo` of each table.

        Raises:
            PeerError: after the loss, another writer has claimed a rank of this process.
        """
        counters = [inserted(table) for _, table in sorted(tables.items())]
        with self._lock:
            lost = any(now < before for now, before in zip(counters, self._counters))
            self._counters = counters
            if lost:
                self._claim_again()

    def _claim_again(self) -> None:
        there = {tuple(entry) for entry in self._read()}
        for (rank, incarnation), entries in self._own_entries.items():
            for entry in entries:
                if tuple(entry) not in there:
                    self._append(entry)
            if self._valid_claims().get((rank, incarnation), set()) - {entries[0][2]}:
                raise PeerError(
                    f"The Reverb server at {self._connection.address} has restarted without its claims, and another "
                    f"writer has claimed rank {rank} (incarnation {incarnation}) since then. Restart this actor, and "
                    "add a checkpointer to the server."
                )

    def envs(self) -> dict[int, int]:
        """Return a dict from rank to the number of environments of its newest incarnation.

        If the server does not answer, return the last known numbers.
        """
        tables = self._connection.try_info()
        with self._lock:
            written = inserted(tables[CLAIMS]) if tables else self._envs[0]
            if self._envs[0] != written:
                latest: dict[int, tuple[int, int]] = {}
                for rank, incarnation, _, kind, count in self._read():
                    if kind == _OPENED:
                        latest[rank] = max(latest.get(rank, (-1, 0)), (incarnation, count))
                self._envs = written, {rank: count for rank, (_, count) in latest.items()}
            return self._envs[1]

    def highest_priority(self, written: int) -> float:
        """Return the highest priority so far (at first 1). `written` counts the priorities that were inserted."""
        with self._lock:
            if written and self._highest[0] != written:
                for _, _, _, _, value in self._connection.draw(HIGHEST, 1, self._connection.timeout):
                    self._highest = written, float(value[0])
            return self._highest[1]

    def raise_highest_priority(self, priority: float, written: int) -> None:
        """Store `priority` as the highest priority, if it is higher than all earlier priorities."""
        with self._lock:
            if priority > self.highest_priority(written):
                self._insert(HIGHEST, np.array([priority], np.float64))

    def _valid_claims(self) -> dict[tuple[int, int], set[int]]:
        """Return a dict from (rank, incarnation) to the tokens of its valid claims.

        If all its claims were withdrawn, the set of tokens is empty.
        """
        claims: dict[tuple[int, int], set[int]] = {}
        withdrawn = set()
        for rank, incarnation, token, kind, _ in self._read():
            if kind == _CLAIMED:
                claims.setdefault((rank, incarnation), set()).add(token)
            elif kind == _WITHDRAWN:
                withdrawn.add(token)
        return {key: tokens - withdrawn for key, tokens in claims.items()}

    def _read(self) -> list[list[int]]:
        """Return all entries of the log. Entries that are written during the call can be missing.

        A table can only be sampled. So draw entries until the number of different entries equals the size of the table.
        Then no entry is missing, because entries are never removed.
        """
        samplers: list[Any] = []

        def read() -> list[list[int]]:
            if not self._connection.info("claim_rank")[CLAIMS].current_size:
                return []
            samplers.append(self._connection.sampler(CLAIMS, _READ_AHEAD))
            seen: dict[int, list[int]] = {}
            size = -1
            while len(seen) != size:
                key, _, size, _, entry = samplers[-1].GetNextTrajectory()
                seen[int(key)] = entry.tolist()
            return list(seen.values())

        try:
            return self._connection.call("claim_rank", read)
        finally:
            for sampler in samplers:
                sampler.Close()

    def _append(self, entry: list[int]) -> None:
        assert len(entry) == CLAIM_FIELDS
        self._insert(CLAIMS, np.array(entry, np.int64))

    def _insert(self, table: str, array: np.ndarray) -> None:
        with contextlib.closing(ReverbInserter(self._connection, table, self._patience)) as inserter:
            inserter.insert([array])
