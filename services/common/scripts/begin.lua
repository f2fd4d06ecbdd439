-- Worker: work on taken entries begins. Answers the clock and a word for each: held, lost, void (its group is settled).
-- KEYS source outstanding clock; ARGV consumer version tracked, then (entry deliveries id)...
local words = {}
for i = 4, #ARGV, 3 do
  local entry, deliveries, id = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local word = 'held'
  if not owns(KEYS[1], entry, ARGV[1], deliveries) then
    word = 'lost'
  elseif ARGV[3] == '1' then
    local place = redis.call('HGET', KEYS[2], id)
    if not place then
      remove(KEYS[1], entry)
      word = 'void'
    else
      local token, began = split(place)
      if ARGV[2] ~= '' then began = ARGV[2] end
      redis.call('HSET', KEYS[2], id, token .. '|' .. began .. '|' .. ARGV[1] .. ':' .. deliveries)
    end
  end
  words[#words + 1] = word
end
return {clock(KEYS[3]), words}
