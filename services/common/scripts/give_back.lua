-- Worker, at SIGTERM: what it still holds becomes claimable at once and does not count as a delivery; the consumer is
-- deleted only when nothing is pending (DELCONSUMER with pending entries would lose them for ever).
-- KEYS source; ARGV consumer idle_ms, then (entry deliveries)...; answers how many went back
local count = 0
for i = 3, #ARGV, 2 do
  if owns(KEYS[1], ARGV[i], ARGV[1], ARGV[i + 1]) then
    redis.call('XCLAIM', KEYS[1], GROUP, '~returned', 0, ARGV[i], 'IDLE', ARGV[2],
      'RETRYCOUNT', tonumber(ARGV[i + 1]) - 1, 'JUSTID')
    count = count + 1
  end
end
local left = redis.pcall('XPENDING', KEYS[1], GROUP, '-', '+', 1, ARGV[1])
if not left.err and #left == 0 then redis.pcall('XGROUP', 'DELCONSUMER', KEYS[1], GROUP, ARGV[1]) end
return count
