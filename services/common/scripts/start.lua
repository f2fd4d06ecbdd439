-- Trainer: a new attempt begins; older ones are fenced from here on. Everything pending in `samples` becomes its own.
-- KEYS clock samples outstanding; ARGV floor recipe; answers {attempt, state, recipe before, {id, place, ...}}
local before = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'recipe')
local attempt = math.max(tonumber(before[1] or '0') + 1, tonumber(ARGV[1]))
if before[2] == 'done' or (before[3] and before[3] ~= ARGV[2]) then
  return {tonumber(before[1]), before[2] or '', before[3] or '', {}}
end
local time = redis.call('TIME')
redis.call('HSETNX', KEYS[1], 'started_ms', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('HSET', KEYS[1], 'attempt', attempt, 'step', 0, 'state', 'running', 'recipe', ARGV[2])
local pending = redis.pcall('XPENDING', KEYS[2], GROUP, '-', '+', 1000000)
if not pending.err then
  for _, found in ipairs(pending) do
    redis.call('XCLAIM', KEYS[2], GROUP, 'trainer-' .. attempt, 0, found[1], 'JUSTID')
  end
end
return {attempt, before[2] or '', before[3] or '', redis.call('HGETALL', KEYS[3])}
