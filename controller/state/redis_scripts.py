"""What runs inside the Redis server: each script is one atomic step of the store, and all take the same keys.

A revision is a whole number that only ever grows, also where the server forgets: when the data is gone, or another
process serves it (which may lack what was acknowledged last), it jumps ahead to milliseconds since 1970 times 2^10 and
the history ends there. So no watcher takes another past for its own, and no expectation meets a number that was given
twice. Numbers stay below 2^53, which is as far as Lua counts exactly.
"""

from __future__ import annotations

SCHEMA = 1
KEYS = ("meta", "keys", "values", "changes", "leases")
"""meta: hash. keys: sorted set of all keys, for prefixes. values: hash of `revision:value`. changes: stream whose ids
are revisions. leases: hash of `epoch:expires at, in ms:holder`."""

_PRELUDE = f"""
local META, NAMES, VALUES, CHANGES, LEASES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

local function whole(number) return string.format('%.0f', number) end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- ARGV[1] is the newest revision that the caller has seen.
local function settle()
  local here = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local known = redis.call('HMGET', META, 'revision', 'server')
  local revision, seen = tonumber(known[1] or '0'), tonumber(ARGV[1])
  if known[2] ~= here or seen > revision then
    revision = math.max(revision + 1, seen + 1, now_ms() * 1024)
    redis.call('HSET', META, 'revision', whole(revision), 'compacted', whole(revision), 'server', here,
      'schema', '{SCHEMA}')
    redis.call('DEL', CHANGES)
  end
  return revision
end

local function lease(name)
  local held = redis.call('HGET', LEASES, name)
  if not held then return 0, 0, '' end
  local epoch, expires, holder = string.match(held, '^(%d+):(%d+):(.*)$')
  return tonumber(epoch), tonumber(expires), holder
end

local function put_lease(name, epoch, expires, holder)
  redis.call('HSET', LEASES, name, whole(epoch) .. ':' .. whole(expires) .. ':' .. holder)
end
"""

LIST = (
    _PRELUDE
    + """
local revision, prefix = settle(), ARGV[2]
local names = redis.call('ZRANGEBYLEX', NAMES, '[' .. prefix, '(' .. prefix .. '\\255')
local found = {whole(revision)}
for first = 1, #names, 1000 do
  local part = {unpack(names, first, math.min(first + 999, #names))}
  local values = redis.call('HMGET', VALUES, unpack(part))
  for n, name in ipairs(part) do
    found[#found + 1] = name
    found[#found + 1] = values[n]
  end
end
return found
"""
)

COMMIT = (
    _PRELUDE
    + """
-- ARGV: seen, history, fence (name or '', holder, epoch), expectations (count, key, revision ...), key, 'put' or
-- 'delete', value ...
local revision, history = settle(), tonumber(ARGV[2])
if ARGV[3] ~= '' then
  local epoch, _, holder = lease(ARGV[3])
  if whole(epoch) ~= ARGV[5] or holder ~= ARGV[4] then return {'fenced', holder, whole(epoch)} end
end
local at = 7
for _ = 1, tonumber(ARGV[6]) do
  local stored = redis.call('HGET', VALUES, ARGV[at])
  local present = stored and string.match(stored, '^%d+') or '0'
  if present ~= ARGV[at + 1] then return {'conflict', ARGV[at], present} end
  at = at + 2
end
-- The history first: a server without memory left refuses the first of these, before anything was changed.
local last = revision
for n = at, #ARGV, 3 do
  last = last + 1
  if ARGV[n + 1] == 'put' then
    redis.call('XADD', CHANGES, whole(last) .. '-0', 'key', ARGV[n], 'value', ARGV[n + 2])
  else
    redis.call('XADD', CHANGES, whole(last) .. '-0', 'key', ARGV[n])
  end
end
redis.call('HSET', META, 'revision', whole(last))
for n = at, #ARGV, 3 do
  revision = revision + 1
  if ARGV[n + 1] == 'put' then
    redis.call('HSET', VALUES, ARGV[n], whole(revision) .. ':' .. ARGV[n + 2])
    redis.call('ZADD', NAMES, 0, ARGV[n])
  else
    redis.call('HDEL', VALUES, ARGV[n])
    redis.call('ZREM', NAMES, ARGV[n])
  end
end
if redis.call('XLEN', CHANGES) > history then
  redis.call('XTRIM', CHANGES, 'MAXLEN', history)
  local oldest = redis.call('XRANGE', CHANGES, '-', '+', 'COUNT', 1)[1][1]
  redis.call('HSET', META, 'compacted', whole(tonumber(string.match(oldest, '^%d+')) - 1))
end
return {'done', whole(last)}
"""
)

CHANGES = (
    _PRELUDE
    + """
-- ARGV: seen, after, how many at most
local revision, after = settle(), tonumber(ARGV[2])
local compacted = tonumber(redis.call('HGET', META, 'compacted'))
if after < compacted or after > revision then return {'too-old', whole(compacted), whole(revision)} end
return {'done', redis.call('XRANGE', CHANGES, whole(after + 1), '+', 'COUNT', ARGV[3])}
"""
)

COMPACT = (
    _PRELUDE
    + """
-- ARGV: seen, revision
local revision = settle()
local compacted = tonumber(redis.call('HGET', META, 'compacted'))
local upto = math.min(math.max(tonumber(ARGV[2]), compacted), revision)
redis.call('XTRIM', CHANGES, 'MINID', whole(upto + 1))
redis.call('HSET', META, 'compacted', whole(upto))
return {'done'}
"""
)

ACQUIRE = (
    _PRELUDE
    + """
-- ARGV: seen, name, holder, milliseconds, the epoch to exceed
settle()
local epoch, expires, holder = lease(ARGV[2])
local left = expires - now_ms()
if holder ~= '' and holder ~= ARGV[3] and left > 0 then return {'held', holder, whole(left)} end
local next_epoch = math.max(epoch, tonumber(ARGV[5])) + 1
put_lease(ARGV[2], next_epoch, now_ms() + tonumber(ARGV[4]), ARGV[3])
return {'done', whole(next_epoch)}
"""
)

RENEW = (
    _PRELUDE
    + """
-- ARGV: seen, name, holder, epoch, milliseconds; 0 of them give it up
settle()
local epoch, _, holder = lease(ARGV[2])
if holder ~= ARGV[3] or whole(epoch) ~= ARGV[4] then return {'fenced', holder, whole(epoch)} end
if ARGV[5] == '0' then
  put_lease(ARGV[2], epoch, 0, '')
else
  put_lease(ARGV[2], epoch, now_ms() + tonumber(ARGV[5]), holder)
end
return {'done'}
"""
)
