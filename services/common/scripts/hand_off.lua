-- Worker: the result goes to the next stream and the entry is gone, in one step; or nothing happens.
-- KEYS source target outstanding
-- ARGV consumer entry deliveries id n data capacity token tracked reason
local tracked = ARGV[9] == '1'
local place = tracked and redis.call('HGET', KEYS[3], ARGV[4])
local token, began = split(place)
if not owns(KEYS[1], ARGV[2], ARGV[1], ARGV[3]) then
  if tracked and place and token == ARGV[8] then return 'done' end
  return 'lost'
end
if tracked and not place then
  remove(KEYS[1], ARGV[2])
  return 'void'
end
local capacity = tonumber(ARGV[7])
if capacity > 0 and waiting(KEYS[2]) >= capacity then return 'full' end
if ARGV[10] ~= '' then
  redis.call('XADD', KEYS[2], '*', 'id', ARGV[4], 'n', ARGV[5], 'reason', ARGV[10])
else
  redis.call('XADD', KEYS[2], '*', 'id', ARGV[4], 'n', ARGV[5], 'data', ARGV[6])
end
if tracked then redis.call('HSET', KEYS[3], ARGV[4], ARGV[8] .. '|' .. began .. '|') end
remove(KEYS[1], ARGV[2])
return 'done'
