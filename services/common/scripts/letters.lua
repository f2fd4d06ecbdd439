-- Operator: what the dead letters are, the oldest first, without their bytes, which may be many.
-- KEYS dead; ARGV from count; answers the server's time in ms and, for each, its id, the number of its bytes, and its other fields
local time = redis.call('TIME')
local letters = {}
for _, letter in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  local row = {letter[1], 0}
  for i = 1, #letter[2], 2 do
    if letter[2][i] == 'data' then
      row[2] = #letter[2][i + 1]
    else
      row[#row + 1] = letter[2][i]
      row[#row + 1] = letter[2][i + 1]
    end
  end
  letters[#letters + 1] = row
end
return {tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000), letters}
