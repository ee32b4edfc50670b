"""Stores for the log and the payloads of the trajectory service: memory, SQLite, or Redis.

A store is an ordered log of records. A record may have a payload, the bytes of one group (`base.py: Store`).

    store = open_store("sqlite:run.db")               # sqlite.py. Other stores: MemoryStore in base.py, and redis.py
    position = store.append(record, payload).result() # the future has the position when the record is durable
      GroupCommitStore.append                         # base.py: one thread commits all waiting appends
        PayloadFile                                   # payload_file.py: the SQLite store has payloads in this file
    store.read(after=0)                               # return the records after a position, in order
    store.payloads([position])                        # return the payloads for a batch
    store.delete_payloads([position])                 # called when a learner has acknowledged the batch
    store.snapshot(position, state)                   # replace all records up to this position
"""

from __future__ import annotations

from rlframe import extras
from rlframe.errors import UsageError, suggest
from rlframe.trajectories.stores.base import RecordsDroppedError, SharedStore, Store

__all__ = ["RecordsDroppedError", "SharedStore", "Store", "open_store"]

_KINDS = ("sqlite", "memory", "redis", "rediss")


def open_store(url: str) -> Store:
    """Open the store of a URL.

    Args:
        url: `sqlite:PATH`, `memory`, or `redis://HOST:PORT/DATABASE` (`rediss://` for TLS). `sqlite:PATH?sync=off`
            acknowledges before the device has written. That is faster, but a power failure loses the last seconds.

    Raises:
        UsageError: The URL names no store, or the store cannot be created there.
        StoreError: The store is in use, belongs to another program, has another format, or is damaged.
        PeerError: The Redis server does not answer.
    """
    kind, _, rest = url.partition(":")
    if kind == "memory" and not rest:
        from rlframe.trajectories.stores.base import MemoryStore

        return MemoryStore()
    if kind == "sqlite" and rest:
        from rlframe.trajectories.stores.sqlite import SQLiteStore

        path, _, option = rest.partition("?")
        if option not in ("", "sync=on", "sync=off"):
            raise UsageError(f"The store sqlite:{path} has the option sync=on or sync=off, not {option!r}.")
        return SQLiteStore(path, sync=option != "sync=off")
    if kind in ("redis", "rediss") and rest:
        with extras.explain_import_error("A store in Redis", "trajectories"):
            from rlframe.trajectories.stores.redis import RedisStore

        return RedisStore(url)
    # The URL may contain a password, so the message shows only a part of it.
    raise UsageError(
        f"{kind!r} names no store.{suggest(kind, _KINDS)} Stores are sqlite:PATH, memory, and redis://HOST:PORT."
    )
