-- Any stage: what cannot be processed goes to the dead letters as it came, and the trainer is told by a tombstone.
-- KEYS source dead samples outstanding clock
-- ARGV consumer entry deliveries id reason data stream max_entries max_bytes tracked tombstone token
if not owns(KEYS[1], ARGV[2], ARGV[1], ARGV[3]) then
  local token = split(redis.call('HGET', KEYS[4], ARGV[4]))
  if ARGV[12] ~= '' and token == ARGV[12] then return 'done' end
  return 'lost'
end
redis.call('XADD', KEYS[2], '*', 'id', ARGV[4], 'stream', ARGV[7], 'entry', ARGV[2], 'deliveries', ARGV[3],
  'reason', ARGV[5], 'data', ARGV[6])
local bytes = redis.call('HINCRBY', KEYS[5], 'dead_bytes', #ARGV[6])
while redis.call('XLEN', KEYS[2]) > tonumber(ARGV[8]) or (bytes > tonumber(ARGV[9]) and redis.call('XLEN', KEYS[2]) > 1) do
  local oldest = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
  for i = 1, #oldest[2], 2 do
    if oldest[2][i] == 'data' then bytes = redis.call('HINCRBY', KEYS[5], 'dead_bytes', -#oldest[2][i + 1]) end
  end
  redis.call('XDEL', KEYS[2], oldest[1])
end
remove(KEYS[1], ARGV[2])
if ARGV[11] == '1' then
  local place = redis.call('HGET', KEYS[4], ARGV[4])
  if place or ARGV[10] == '0' then
    redis.call('XADD', KEYS[3], '*', 'id', ARGV[4], 'n', '0', 'reason', 'poison')
  end
  if place and ARGV[10] == '1' then
    local _, began = split(place)
    redis.call('HSET', KEYS[4], ARGV[4], ARGV[12] .. '|' .. began .. '|')
  end
end
return 'done'
