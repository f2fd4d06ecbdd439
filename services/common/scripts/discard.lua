-- Operator: dead letters are deleted.
-- KEYS dead clock; ARGV letter...; answers done or gone for each
local words = {}
for i = 1, #ARGV do
  local letter = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  if letter then
    for j = 1, #letter[2], 2 do
      if letter[2][j] == 'data' then redis.call('HINCRBY', KEYS[2], 'dead_bytes', -#letter[2][j + 1]) end
    end
    redis.call('XDEL', KEYS[1], ARGV[i])
  end
  words[i] = letter and 'done' or 'gone'
end
return words
