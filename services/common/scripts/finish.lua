-- Trainer: the run is over. Streams and places are emptied; workers that come back with a result are told `void` or `lost`.
-- KEYS clock outstanding stream...; ARGV attempt
if fenced(KEYS[1], ARGV[1]) then return fenced(KEYS[1], ARGV[1]) end
redis.call('HSET', KEYS[1], 'state', 'done')
redis.call('DEL', KEYS[2])
for i = 3, #KEYS do
  redis.call('DEL', KEYS[i])
  redis.call('XGROUP', 'CREATE', KEYS[i], GROUP, '0', 'MKSTREAM')
end
return 'done'
