-- Trainer: the server has lost this attempt with its data, or went back to before it: the clock says it again. Never over a newer one.
-- KEYS clock; ARGV attempt recipe step; answers done or fenced
if fenced(KEYS[1], ARGV[1]) == 'fenced' then return 'fenced' end
local time = redis.call('TIME')
redis.call('HSETNX', KEYS[1], 'started_ms', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('HSET', KEYS[1], 'attempt', ARGV[1], 'step', ARGV[3], 'state', 'running', 'recipe', ARGV[2])
return 'done'
