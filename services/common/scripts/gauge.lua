-- Trainer, every second: for each stream the entries waiting, held, and the age of the oldest waiting one in ms (-1: none);
-- consumers that have been idle for an hour with nothing pending are removed.
-- KEYS stream...; ARGV idle_ms
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local answer = {}
for i = 1, #KEYS do
  local held, delivered = 0, '0-0'
  local groups = redis.pcall('XINFO', 'GROUPS', KEYS[i])
  if not groups.err then
    for _, group in ipairs(groups) do
      local field = {}
      for j = 1, #group, 2 do field[group[j]] = group[j + 1] end
      if field['name'] == GROUP then held, delivered = tonumber(field['pending']), field['last-delivered-id'] end
    end
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[i], GROUP)) do
      local field = {}
      for j = 1, #consumer, 2 do field[consumer[j]] = consumer[j + 1] end
      if field['pending'] == 0 and field['idle'] > tonumber(ARGV[1]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[i], GROUP, field['name'])
      end
    end
  end
  local first = redis.call('XRANGE', KEYS[i], '(' .. delivered, '+', 'COUNT', 1)[1]
  local age_ms = -1
  if first then age_ms = now_ms - tonumber(string.match(first[1], '^(%d+)')) end
  answer[#answer + 1] = {redis.call('XLEN', KEYS[i]) - held, held, age_ms}
end
return answer
