-- Trainer: a group enters the run, once.
-- KEYS clock outstanding requests; ARGV attempt id data tracked
if fenced(KEYS[1], ARGV[1]) then return fenced(KEYS[1], ARGV[1]) end
if ARGV[4] == '1' then
  if redis.call('HSETNX', KEYS[2], ARGV[2], 'requests:trainer:' .. ARGV[1] .. '||') == 0 then return 'already' end
end
redis.call('XADD', KEYS[3], '*', 'id', ARGV[2], 'n', '1', 'data', ARGV[3])
return 'done'
