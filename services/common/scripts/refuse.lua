-- Any stage: what cannot be processed goes to the dead letters as it came, and the trainer is told by a tombstone.
-- KEYS source dead samples outstanding clock
-- ARGV consumer entry deliveries id reason data stream max_entries max_bytes tracked tombstone token
if not owns(KEYS[1], ARGV[2], ARGV[1], ARGV[3]) then
  local token = split(redis.call('HGET', KEYS[4], ARGV[4]))
  if ARGV[12] ~= '' and token == ARGV[12] then return 'done' end
  return 'lost'
end
local tombstone = ''
remove(KEYS[1], ARGV[2])
if ARGV[11] == '1' then
  local place = redis.call('HGET', KEYS[4], ARGV[4])
  if place or ARGV[10] == '0' then
    tombstone = redis.call('XADD', KEYS[3], '*', 'id', ARGV[4], 'n', '0', 'reason', 'poison')
  end
  if place and ARGV[10] == '1' then
    local _, began = split(place)
    redis.call('HSET', KEYS[4], ARGV[4], ARGV[12] .. '|' .. began .. '|')
  end
end
-- The letter names the tombstone: while nobody has taken that, the entry can still go back (requeue).
local letter = {'id', ARGV[4], 'stream', ARGV[7], 'entry', ARGV[2], 'deliveries', ARGV[3], 'reason', ARGV[5], 'tombstone', tombstone, 'data', ARGV[6]}
bury(KEYS[2], KEYS[5], letter, ARGV[8], ARGV[9])
return 'done'
