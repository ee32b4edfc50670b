"""The tables of a Reverb server for an agent, and functions that read a table's counters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

from rlframe.errors import UsageError
from rlframe.replay.rate_limiter import RateLimiter, items_kept
from rlframe.replay.reverb.connection import CLAIMS, HIGHEST, REPLAY, import_reverb
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
