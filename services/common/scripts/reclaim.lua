-- Trainer: entries that a replaced trainer has read since this attempt began become its own. A read is not fenced, and one that
-- waits in the server is answered even while its process is stopped; nobody else would ever look at what it took.
-- KEYS clock stream...; ARGV attempt; answers how many, or fenced, or forgotten
if fenced(KEYS[1], ARGV[1]) then return fenced(KEYS[1], ARGV[1]) end
local mine, count = 'trainer-' .. ARGV[1], 0
for i = 2, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[i], GROUP, '-', '+', 1000000)
  if not pending.err then
    for _, found in ipairs(pending) do
      if found[2] ~= mine then
        redis.call('XCLAIM', KEYS[i], GROUP, mine, 0, found[1], 'JUSTID')
        count = count + 1
      end
    end
  end
end
return count
