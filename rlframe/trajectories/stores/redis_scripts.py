"""What a Redis server carries out in one step, as Lua, and the keys that it does it to.

Redis writes a script's changes to its append-only file as a transaction. Where the server is killed in the middle of
that, it cuts the file off at its next start, but leaves the beginning of the transaction there: at the start after
that, this beginning is carried out, together with whatever transaction came next. So nothing here may depend on what
such a beginning leaves: values are set, never added to; a commit is one entry of the stream, added at the end of its
transaction; and where two entries begin at one position, the later one counts.
"""

from __future__ import annotations

PREFIX = "rlframe:trajectories:"
META = PREFIX + "meta"  # hash: format, payload_bytes
LOG = PREFIX + "log"  # stream: FIRST_POSITION-TIME -> by (which commit of which process), count, records
PAYLOADS = PREFIX + "payloads"  # hash: position -> payload
SNAPSHOT = PREFIX + "snapshot"  # hash: position, state
WRITER = PREFIX + "writer:"  # and a process's name; hash: commit, first (its position)

# A commit is numbered within its process, so that one that is sent again after a lost answer is told from a new one,
# and one that was given up and arrives late is refused.
APPEND = """
local end_of_log = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local last = 0
if end_of_log then last = tonumber(string.match(end_of_log[1], '%d+')) + tonumber(end_of_log[2][4]) - 1 end

local writer = redis.call('HMGET', KEYS[4], 'commit', 'first')
local known, commit = tonumber(writer[1] or 0), tonumber(ARGV[1])
if commit < known then return redis.error_reply('LATE this commit was given up') end
if commit == known and tonumber(writer[2]) <= last then
  local there = redis.call('XREVRANGE', KEYS[2], writer[2], writer[2], 'COUNT', 1)[1]
  if not there or there[2][2] == ARGV[2] then return tonumber(writer[2]) end
end

local with_payload, size = ARGV[4], 0
local next_payload = 6
for i = 1, #with_payload do
  if string.sub(with_payload, i, i) == '1' then
    local position = string.format('%.0f', last + i)
    size = size + #ARGV[next_payload] - redis.call('HSTRLEN', KEYS[3], position)
    redis.call('HSET', KEYS[3], position, ARGV[next_payload])
    next_payload = next_payload + 1
  end
end
local bytes = tonumber(redis.call('HGET', KEYS[1], 'payload_bytes') or 0)
redis.call('HSET', KEYS[1], 'payload_bytes', string.format('%.0f', bytes + size))
local first = string.format('%.0f', last + 1)
redis.call('HSET', KEYS[4], 'commit', ARGV[1], 'first', first)
redis.call('EXPIRE', KEYS[4], ARGV[3])
local time = redis.call('TIME')
local id = first .. '-' .. string.format('%.0f', time[1] * 1000000 + time[2])
redis.call('XADD', KEYS[2], id, 'by', ARGV[2], 'count', #with_payload, 'records', ARGV[5])
return last + 1
"""

FORGET = """
local bytes = tonumber(redis.call('HGET', KEYS[1], 'payload_bytes') or 0)
for _, position in ipairs(ARGV) do
  local size = redis.call('HSTRLEN', KEYS[2], position)
  if redis.call('HDEL', KEYS[2], position) == 1 then bytes = bytes - size end
end
redis.call('HSET', KEYS[1], 'payload_bytes', string.format('%.0f', bytes))
return 0
"""

# Commits since the snapshot before stay, so that a process that is a little behind need not load this one; so does the
# one with the record at its position: whoever reads on from there makes sure that the log is still the same.
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
