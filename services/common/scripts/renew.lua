-- Worker: keep what is held from being taken over. JUSTID leaves the delivery count as it is.
-- KEYS source clock; ARGV consumer, then (entry deliveries)...; answers the clock and kept or lost for each
local words = {}
for i = 2, #ARGV, 2 do
  if owns(KEYS[1], ARGV[i], ARGV[1], ARGV[i + 1]) then
    redis.call('XCLAIM', KEYS[1], GROUP, ARGV[1], 0, ARGV[i], 'JUSTID')
    words[#words + 1] = 'kept'
  else
    words[#words + 1] = 'lost'
  end
end
return {clock(KEYS[2]), words}
