-- Put before every script of this folder. GROUP is the one consumer group of each stream.
local GROUP = 'hr'

-- The claim token: this consumer holds the entry, delivered exactly so often. A stream or group that is gone holds nothing.
local function owns(stream, entry, consumer, deliveries)
  local found = redis.pcall('XPENDING', stream, GROUP, entry, entry, 1, consumer)
  if found.err then
    if string.find(found.err, 'NOGROUP', 1, true) then return false end
    error(found.err)
  end
  return #found == 1 and tonumber(found[1][4]) == tonumber(deliveries)
end

-- Entries that nobody holds. What a consumer holds does not count, so it cannot block the stage before.
local function waiting(stream)
  local pending = redis.pcall('XPENDING', stream, GROUP)
  return redis.call('XLEN', stream) - (pending.err and 0 or tonumber(pending[1]))
end

local function remove(stream, entry)
  redis.pcall('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
end

-- A place in `outstanding` is "token|began|holder": who put the group where it is, the version that its generator served
-- when it began ('' before), and who works on it now ('' nobody).
local function split(place)
  local token, began, holder = string.match(place or '', '^([^|]*)|([^|]*)|([^|]*)$')
  return token or '', began or '', holder or ''
end

-- attempt, step, state, server time in ms, run's start in ms
local function clock(key)
  local seen = redis.call('HMGET', key, 'attempt', 'step', 'state', 'started_ms')
  local time = redis.call('TIME')
  local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  return {tonumber(seen[1] or '0'), tonumber(seen[2] or '0'), seen[3] or '', now_ms, tonumber(seen[4] or '0')}
end

-- Why a trainer's call is refused: `fenced` when a newer attempt has begun; `forgotten` when the server knows of no attempt so
-- late, since its data were lost or rolled back: the trainer then says it again (remember.lua). False when nothing is wrong.
local function fenced(key, attempt)
  local now = tonumber(redis.call('HGET', key, 'attempt') or '0')
  if now > tonumber(attempt) then return 'fenced' end
  return now < tonumber(attempt) and 'forgotten'
end

-- A dead letter, by field and value with `data` last; the oldest go when there are too many, or too many bytes (which the
-- clock counts). The last one stays, whatever its size.
local function bury(dead, clock_key, letter, max_entries, max_bytes)
  redis.call('XADD', dead, '*', unpack(letter))
  local bytes = redis.call('HINCRBY', clock_key, 'dead_bytes', #letter[#letter])
  while redis.call('XLEN', dead) > tonumber(max_entries) or (bytes > tonumber(max_bytes) and redis.call('XLEN', dead) > 1) do
    local oldest = redis.call('XRANGE', dead, '-', '+', 'COUNT', 1)[1]
    for i = 1, #oldest[2], 2 do
      if oldest[2][i] == 'data' then bytes = redis.call('HINCRBY', clock_key, 'dead_bytes', -#oldest[2][i + 1]) end
    end
    redis.call('XDEL', dead, oldest[1])
  end
end
