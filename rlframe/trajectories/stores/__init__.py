"""Where the trajectory service keeps its log and its payloads: memory, SQLite, or Redis. Here is what it asks of them.

The service is a deterministic state machine. A command takes effect by its place in the log; whoever reads the log
from a snapshot on computes the same state. The bytes of a group are a payload: they stay in the store until a batch
needs them, so the queue may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from rlframe import extras
from rlframe.errors import StoreError, UnavailableError, UsageError, suggest

_KINDS = ("sqlite", "memory", "redis", "rediss")


class RecordsDroppedError(UnavailableError):
    """Records after the position that was asked for went with a newer snapshot: `load` it, and read on from there."""


class Store(Protocol):
    """An ordered durable log with payloads. Every method may be called from any thread, and none waits for ever.

    Attributes:
        shared: whether other processes append too, so that only `read` tells the order: it is a `SharedStore`.
        durability: a sentence for people: what an acknowledged append survives.
    """

    shared: bool
    durability: str

    def append(self, record: bytes, payload: bytes | None = None) -> Future[int]:
        """Put a record at the end of the log, and the payload, if any, beside it. Does not wait.

        Returns:
            Its position, 1 or more, once it is durable. Positions have no gaps, and of two calls in one process the
            later one gets the higher position. Futures are resolved in the order of positions, by one thread, which
            runs their callbacks: these must be short. They cannot be cancelled.

            A future that raises `UnavailableError` left nothing behind; one that raises `PeerError` may have been
            applied (`read` tells); after a `StoreError` the store takes no more.

        Raises:
            UnavailableError: too much waits to be written, or the store is closed.
            StoreError: the store failed before.
        """

    def room(self) -> int | None:
        """Bytes of payloads that its disk still takes; None where it cannot tell."""

    def check_room(self, size: int) -> None:
        """Raise `UnavailableError` where its disk has no room for payloads of so many bytes. To records without one it
        does not apply: they empty the queue."""

    def read(self, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        """The first `limit` records at positions above `after`, whoever appended them, with these positions.

        Raises:
            RecordsDroppedError: some of them went with a snapshot.
            StoreError: the log ends before `after`, or is no longer the one that was read: the store lost records.
        """

    def payloads(self, positions: Sequence[int]) -> list[bytes | None]:
        """The payloads stored under these positions. None: there was none, it was forgotten, or it is damaged."""

    def forget(self, positions: Iterable[int]) -> None:
        """Drop payloads; their space is used again. Does not wait, and may be undone by a crash: see `held`."""

    def held(self) -> list[int]:
        """The positions of all payloads, ascending.

        Whoever has replayed the log up to a position forgets those up to it that its state does not need: what a crash
        left behind.
        """

    def snapshot(self, position: int, state: bytes) -> Future[None]:
        """Keep `state`, which is what the records up to `position` lead to. These records may then be dropped.

        One that is not newer than the last is ignored. Payloads are not touched. Resolved when it is durable.
        """

    def load(self) -> tuple[int, bytes] | None:
        """The last snapshot's position and state; None if there is none. `read(after=position)` goes on from it."""

    def close(self) -> None:
        """Write what was appended, and let go of everything. May be called again."""


class SharedStore(Store, Protocol):
    """A store that other processes append to, too."""

    def wait(self, after: int, timeout: float) -> bool:
        """Wait until there is a record at a position above `after`, at most `timeout` seconds. Returns if there is.

        Raises:
            PeerError: the store did not answer, again and again.
        """


def check_range(after: int, first: int | None, last: int, name: str) -> None:
    """Refuse to read above `after` from a log that ends at `last`, and whose first record above it is at `first`."""
    if after > last:
        raise StoreError(f"{name} ends at position {last}, but was read up to {after} before: it lost records.")
    if after < last and first != after + 1:
        raise RecordsDroppedError(f"{name} no longer has the record at position {after + 1}: load the snapshot.")


def open_store(url: str) -> Store:
    """Open the store that a URL names.

    Args:
        url: `sqlite:PATH`, `memory`, or `redis://HOST:PORT/DATABASE` (`rediss://` for TLS). `sqlite:PATH?sync=off`
            acknowledges before the device has written: faster, and the last seconds are lost when power is.

    Raises:
        UsageError: the URL names no store, or one that cannot be there.
        StoreError: the store is in use, another program's, of another format, or damaged.
        PeerError: the Redis server does not answer.
    """
    kind, _, rest = url.partition(":")
    if kind == "memory" and not rest:
        from rlframe.trajectories.stores.memory import MemoryStore

        return MemoryStore()
    if kind == "sqlite" and rest:
        from rlframe.trajectories.stores.sqlite import SQLiteStore

        path, _, option = rest.partition("?")
        if option not in ("", "sync=on", "sync=off"):
            raise UsageError(f"The store sqlite:{path} has the option sync=on or sync=off, not {option!r}.")
        return SQLiteStore(path, sync=option != "sync=off")
    if kind in ("redis", "rediss") and rest:
        with extras.needed("A store in Redis", "trajectories"):
            from rlframe.trajectories.stores.redis import RedisStore

        return RedisStore(url)
    # Not the whole URL: it may hold a password.
    raise UsageError(
        f"{kind!r} names no store.{suggest(kind, _KINDS)} Stores are sqlite:PATH, memory, and redis://HOST:PORT."
    )
