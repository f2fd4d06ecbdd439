-- Trainer: a new attempt begins; older ones are fenced from here on. Everything pending in `samples` becomes its own, and what
-- earlier attempts asked for evaluation is thrown away: nobody waits for it.
-- KEYS clock samples outstanding, then the streams of evaluation; ARGV floor recipe step mode
-- Answers {attempt, state, recipe before, {id, place, ...}, word}. The word is `refused`, and nothing has changed, when the run has
-- another recipe, when it is done (unless mode is `again`), or when it is there at all and mode is `first`.
local before = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'recipe')
local attempt = math.max(tonumber(before[1] or '0') + 1, tonumber(ARGV[1]))
if (before[3] and before[3] ~= ARGV[2]) or (before[2] == 'done' and ARGV[4] ~= 'again') or (before[1] and ARGV[4] == 'first') then
  return {tonumber(before[1] or '0'), before[2] or '', before[3] or '', {}, 'refused'}
end
local time = redis.call('TIME')
redis.call('HSETNX', KEYS[1], 'started_ms', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('HSET', KEYS[1], 'attempt', attempt, 'step', ARGV[3] or '0', 'state', 'running', 'recipe', ARGV[2])
local pending = redis.pcall('XPENDING', KEYS[2], GROUP, '-', '+', 1000000)
if not pending.err then
  for _, found in ipairs(pending) do
    redis.call('XCLAIM', KEYS[2], GROUP, 'trainer-' .. attempt, 0, found[1], 'JUSTID')
  end
end
for i = 4, #KEYS do
  redis.call('XTRIM', KEYS[i], 'MAXLEN', 0)
  local taken = redis.pcall('XPENDING', KEYS[i], GROUP, '-', '+', 1000000)
  if not taken.err then
    for _, found in ipairs(taken) do redis.call('XACK', KEYS[i], GROUP, found[1]) end
  end
end
return {attempt, before[2] or '', before[3] or '', redis.call('HGETALL', KEYS[3]), 'started'}
