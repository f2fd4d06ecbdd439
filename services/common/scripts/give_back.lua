-- Worker, at SIGTERM: what it still holds becomes claimable at once and does not count as a delivery; the consumer is
-- deleted only when nothing is pending (DELCONSUMER with pending entries would lose them for ever). A group whose request
-- goes back counts as begun by nobody: what waits there does not age.
-- KEYS source outstanding; ARGV consumer idle_ms, then (entry deliveries id)...; answers how many went back
local count, requests = 0, string.find(KEYS[1], ':requests$')
for i = 3, #ARGV, 3 do
  if owns(KEYS[1], ARGV[i], ARGV[1], ARGV[i + 1]) then
    redis.call('XCLAIM', KEYS[1], GROUP, '~returned', 0, ARGV[i], 'IDLE', ARGV[2],
      'RETRYCOUNT', tonumber(ARGV[i + 1]) - 1, 'JUSTID')
    local place = requests and redis.call('HGET', KEYS[2], ARGV[i + 2])
    if place then redis.call('HSET', KEYS[2], ARGV[i + 2], split(place) .. '||') end
    count = count + 1
  end
end
local left = redis.pcall('XPENDING', KEYS[1], GROUP, '-', '+', 1, ARGV[1])
if not left.err and #left == 0 then redis.pcall('XGROUP', 'DELCONSUMER', KEYS[1], GROUP, ARGV[1]) end
return count
