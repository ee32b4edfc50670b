"""A store in a Redis server, shared by several service processes."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlframe import retry
from rlframe.errors import PeerError, RlframeError, StoreError, UnavailableError, UsageError
from rlframe.trajectories.stores.base import Append, Commit, GroupCommitStore, RecordsDroppedError, UnlimitedStore

DEADLINE = 15.0  # seconds; longer than a restart of the server, but shorter than the timeouts of HTTP clients
_ATTEMPT_TIMEOUT = 5.0  # seconds for the server to send or accept the next bytes
_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds: the first and the longest pause of the exponential backoff
_BLOCK = 1.0  # maximum seconds of one blocking read, which delays the end of a closed store
_PAYLOADS_PER_READ = 64  # maximum number of payloads in one answer
_WRITER_EXPIRES = 86_400  # seconds for which the last commit number of a process is stored, much more than the deadline
_FORMAT = b"2"
_COMMITS_PER_READ = 64  # maximum number of commits in one answer; a commit has up to 1024 records

_UNANSWERED = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError)
_LATEST = 2**64 - 1  # largest second part of a stream id; it is sorted after all other ids with the same first part
_Entry = tuple[int, bytes, bytes]  # (position, record, "writer:number" of the record's commit)
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[bytes]).decode
# The keys, and the Lua scripts that the Redis server executes atomically. Redis writes the changes of a script to its
# append-only file as a transaction. If the server is killed during this write, an incomplete transaction remains in the
# file after the restart. At the restart after that, the server executes it together with the following transaction.
# So the scripts must be correct even if a part of an old script is executed later. They set values and never add to
# values. A commit is one entry of the stream, which is added at the end of the transaction. If two entries begin at the
# same position, the later entry counts.
PREFIX = "rlframe:trajectories:"
META = PREFIX + "meta"  # hash: format
LOG = PREFIX + "log"  # stream: id FIRST_POSITION-TIME, fields by ("writer:number" of the commit), count, records
PAYLOADS = PREFIX + "payloads"  # hash: position -> payload
SNAPSHOT = PREFIX + "snapshot"  # hash: position, state
WRITER = PREFIX + "writer:"  # hash for each process: number of its last commit, first position of this commit

# Each process numbers its commits. So the script recognizes a commit that is sent again after a lost answer. It refuses
# a commit that arrives after a later commit of the same process.
APPEND = """
local end_of_log = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local last = 0
if end_of_log then last = tonumber(string.match(end_of_log[1], '%d+')) + tonumber(end_of_log[2][4]) - 1 end

local writer = redis.call('HMGET', KEYS[3], 'commit', 'first')
local known, commit = tonumber(writer[1] or 0), tonumber(ARGV[1])
if commit < known then return redis.error_reply('LATE this commit was given up') end
if commit == known and tonumber(writer[2]) <= last then
  local there = redis.call('XREVRANGE', KEYS[1], writer[2], writer[2], 'COUNT', 1)[1]
  if not there or there[2][2] == ARGV[2] then return tonumber(writer[2]) end
end

local with_payload, next_payload = ARGV[4], 6
for i = 1, #with_payload do
  if string.sub(with_payload, i, i) == '1' then
    redis.call('HSET', KEYS[2], string.format('%.0f', last + i), ARGV[next_payload])
    next_payload = next_payload + 1
  end
end
local first = string.format('%.0f', last + 1)
redis.call('HSET', KEYS[3], 'commit', ARGV[1], 'first', first)
redis.call('EXPIRE', KEYS[3], ARGV[3])
local time = redis.call('TIME')
local id = first .. '-' .. string.format('%.0f', time[1] * 1000000 + time[2])
redis.call('XADD', KEYS[1], id, 'by', ARGV[2], 'count', #with_payload, 'records', ARGV[5])
return last + 1
"""

# Commits after the previous snapshot are not deleted, so that a process that is slightly behind need not load the new
# snapshot. The commit with the last record of the previous snapshot is not deleted either. Readers use it to check that
# the log is still the same.
TAKE_SNAPSHOT = """
local before = redis.call('HGET', KEYS[1], 'position')
if tonumber(ARGV[1]) <= tonumber(before or 0) then return 0 end
redis.call('HSET', KEYS[1], 'position', ARGV[1], 'state', ARGV[2])
if before then
  local holding = redis.call('XREVRANGE', KEYS[2], before, '-', 'COUNT', 1)[1]
  if holding then redis.call('XTRIM', KEYS[2], 'MINID', holding[1]) end
end
return 1
"""

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class RedisStore(UnlimitedStore, GroupCommitStore):  # Redis refuses commands when its memory is full
    """A `Store` for several processes. The Redis server's persistence settings decide which failures the data survives.

    If the server does not answer, calls are retried until a deadline. A retried append is applied once.

    Args:
        url: redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], or rediss:// for TLS. Each service needs its own
            database.
        deadline: Maximum seconds for a call with all its retries, and from an append to its acknowledgment.

    Raises:
        UsageError: The URL is invalid, or the server refuses the credentials.
        PeerError: The server does not answer.
        StoreError: The server evicts data when its memory is full, or has data of another format.
    """

    shared = True

    def __init__(self, url: str, *, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        try:
            self._redis: Any = redis.Redis.from_url(
                url,
                socket_timeout=max(2 * _BLOCK, min(_ATTEMPT_TIMEOUT, deadline)),
                socket_connect_timeout=min(_ATTEMPT_TIMEOUT, deadline),
                retry=Retry(NoBackoff(), 0),  # only `_call` retries, because retries of the library have no deadline
                decode_responses=False,
            )
        except ValueError as error:
            raise UsageError(f"The store's URL is not a valid Redis URL: {error}.") from error
        options = self._redis.connection_pool.connection_kwargs
        self._name = f"Redis at {options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self._append = self._redis.register_script(APPEND)
        self._take_snapshot = self._redis.register_script(TAKE_SNAPSHOT)
        self._writer = secrets.token_hex(8)
        self._commit_number = 0
        self._newest = 0  # highest position that the server has returned to this process
        self._last_read: tuple[int, bytes] | None = None  # (position, commit) of the last record that `read` returned
        try:
            self.durability = self._call("opening it", self._prepare)
        except BaseException:
            self._redis.close()
            raise
        super().__init__(self._name)

    def read(self, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        # Read the record at `after` again. If it has changed, the server has lost acknowledged records.
        entries = [entry for commit in self._commits_from(after, limit) for entry in commit if entry[0] >= after]
        here = entries.pop(0) if after and entries and entries[0][0] == after else None
        seen = self._last_read
        changed = here and seen and here[0] == seen[0] and here[2] != seen[1]
        if changed or (after and not here and not entries):
            raise StoreError(
                f"{self._name} lost records that it had acknowledged: its log is no longer the one that was read up to "
                f"position {after}. Restart the service; it then continues with the records in Redis. To keep every "
                "record, set `appendonly yes` and `appendfsync always` in Redis."
            )
        if (after and not here) or (entries and entries[0][0] != after + 1):
            raise RecordsDroppedError(f"{self._name} no longer has all records after {after}: load the snapshot.")
        del entries[limit:]
        if entries:
            self._last_read = (entries[-1][0], entries[-1][2])
        return [(position, record) for position, record, _ in entries]

    def wait(self, after: int, timeout: float) -> bool:
        end = time.monotonic() + timeout

        def ask() -> bool:
            block = max(1, int(min(end - time.monotonic(), _BLOCK) * 1000))  # 0 would wait forever
            since = f"{after}-{_LATEST}"
            return self._last() > after or bool(self._redis.xread({LOG: since}, count=1, block=block))

        while not self._closed:
            if self._call("waiting for records", ask):
                return True
            if time.monotonic() >= end:
                return False
        self._disconnect()
        return False

    def _commits_from(self, position: int, limit: int) -> list[list[_Entry]]:
        """Return the commit with the record at `position`, and later commits with at least `limit` records, if any."""

        def ask() -> list[list[_Entry]]:
            holding = self._redis.xrevrange(LOG, f"{position}-{_LATEST}", "-", 1)
            start = holding[0][0] if holding else b"-"
            # Commits by first position. Of two commits at the same position, the later commit counts (see the scripts).
            commits: dict[int, list[_Entry]] = {}
            while True:
                page = self._redis.xrange(LOG, start, "+", _COMMITS_PER_READ)
                for name, fields in page:
                    first = int(name.partition(b"-")[0])
                    records = _decode(fields[b"records"])
                    commits[first] = [(first + i, record, fields[b"by"]) for i, record in enumerate(records)]
                # Read one commit more than needed, because this commit may replace the commit before it.
                if len(page) < _COMMITS_PER_READ or sum(map(len, list(commits.values())[1:-1])) >= limit:
                    return list(commits.values())
                start = b"(" + page[-1][0]

        return self._call("reading the log", ask)

    def _last(self) -> int:
        """Return the position of the last record."""
        newest = self._redis.xrevrange(LOG, "+", "-", 1)
        return int(newest[0][0].partition(b"-")[0]) + int(newest[0][1][b"count"]) - 1 if newest else 0

    def payloads(self, positions: Sequence[int]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(positions), _PAYLOADS_PER_READ):
            some = positions[start : start + _PAYLOADS_PER_READ]
            found += self._call("reading payloads", functools.partial(self._redis.hmget, PAYLOADS, some))
        return found

    def payload_positions(self) -> list[int]:
        return sorted(map(int, self._call("listing payloads", lambda: self._redis.hkeys(PAYLOADS))))

    def load(self) -> tuple[int, bytes] | None:
        found = self._call("loading the snapshot", lambda: self._redis.hmget(SNAPSHOT, ["position", "state"]))
        return None if found[0] is None else (int(found[0]), found[1])

    def close(self) -> None:
        super().close()
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the connections that are not in use by other threads."""
        self._redis.connection_pool.disconnect(inuse_connections=False)

    def _prepare(self) -> str:
        """Check that the server can be used as a store. Return the text of `durability`."""
        memory = self._redis.info("memory")
        if memory["maxmemory"] and memory["maxmemory_policy"] != "noeviction":
            raise StoreError(
                f"{self._name} evicts data when its memory is full (maxmemory-policy "
                f"{memory['maxmemory_policy']}). Set `maxmemory-policy noeviction`."
            )
        self._redis.hsetnx(META, "format", _FORMAT)
        if (found := self._redis.hget(META, "format")) != _FORMAT:
            raise StoreError(
                f"{self._name} holds a store of format {found!r}; this version of rlframe reads format {_FORMAT!r}."
            )
        return self._persistence()

    def _persistence(self) -> str:
        if not self._redis.info("persistence")["aof_enabled"]:
            lost = "changes since its last dump are lost when the Redis server ends"
            advice = "Set `appendonly yes` and `appendfsync always` in Redis to keep them."
        else:
            try:
                policy = self._redis.config_get("appendfsync")["appendfsync"]
            except (redis.ResponseError, KeyError):  # servers of cloud providers may hide their settings
                policy = "unknown"
            if policy == "always":
                return "Acknowledged data survives a crash of the service, a crash of Redis, and a power failure."
            lost = f"the last second or more may be lost when the Redis server's machine fails (appendfsync {policy})"
            advice = "Set `appendfsync always` in Redis to keep it."
        _logger.warning("%s: %s. %s", self._name, lost, advice)
        return f"Acknowledged data survives a crash of the service; {lost}."

    # Writing, in the thread of `GroupCommitStore`

    def _write(self, commit: Commit) -> int:
        first = self._newest + 1
        if commit.appends:
            first = self._write_appends(commit.appends)
        for start in range(0, len(commit.deleted), 1000):
            some = commit.deleted[start : start + 1000]
            self._call("forgetting payloads", functools.partial(self._redis.hdel, PAYLOADS, *some))
        if commit.snapshot:
            state: list[Any] = list(commit.snapshot)
            self._call("taking a snapshot", lambda: self._take_snapshot([SNAPSHOT, LOG], state))
        return first

    def _write_appends(self, appends: list[Append]) -> int:
        self._commit_number += 1
        by = f"{self._writer}:{self._commit_number}"
        payloads = [append.payload for append in appends if append.payload is not None]
        flags = "".join("0" if append.payload is None else "1" for append in appends)
        records = _encode([append.record for append in appends])
        keys = [LOG, PAYLOADS, WRITER + self._writer]
        arguments: list[Any] = [self._commit_number, by, _WRITER_EXPIRES, flags, records, *payloads]
        first = self._call("appending", lambda: self._append(keys, arguments), since=appends[0].since)
        if first <= self._newest:
            raise StoreError(
                f"{self._name} gave position {first} after {self._newest}: it lost records that it had acknowledged. "
                "Restart the service; it then continues with the records in Redis."
            )
        self._newest = first + len(appends) - 1
        return first

    def _call(self, action: str, call: Callable[[], _T], since: float | None = None) -> _T:
        """Retry a call until the server answers, or until the deadline after `since`. At least one call is made."""
        start = time.monotonic() if since is None else since
        pauses = retry.backoff(_PAUSE, _LONGEST_PAUSE, self._deadline, since=start)
        while True:
            try:
                return call()
            except redis.AuthenticationError as error:
                raise UsageError(f"{self._name} refuses the credentials in the store's URL: {error}.") from error
            except _UNANSWERED as error:
                pause, waited = next(pauses, None), time.monotonic() - start
                if pause is None:
                    raise PeerError(
                        f"{self._name} did not answer for {waited:.1f} s while {action} ({error})."
                    ) from error
                time.sleep(pause)
            except redis.RedisError as error:
                raise self._refused(action, error) from error

    def _refused(self, action: str, error: redis.RedisError) -> RlframeError:
        if isinstance(error, redis.exceptions.OutOfMemoryError):
            return UnavailableError(f"{self._name} has no memory left ({error}). Raise its maxmemory, or train faster.")
        if "WRONGTYPE" in str(error):
            return StoreError(f"{self._name}: keys under {PREFIX} belong to another program. Use another database.")
        return UnavailableError(f"{self._name} refused {action} ({error}).")
