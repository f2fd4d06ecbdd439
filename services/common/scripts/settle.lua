-- Trainer: groups of a step (or of a drop) leave the run, and the clock moves on.
-- KEYS clock samples outstanding; ARGV attempt step call, then (entry id)...; entry '' where only the hash knows the group
-- `call` names this very call, so that its repetition answers done. Answers done, fenced, forgotten, or lost: an entry that the
-- trainer held is not pending any more, which no other party may bring about.
if fenced(KEYS[1], ARGV[1]) then return fenced(KEYS[1], ARGV[1]) end
if redis.call('HGET', KEYS[1], 'settled') == ARGV[3] then return 'done' end
local missing = 0
for i = 4, #ARGV, 2 do
  local entry, id = ARGV[i], ARGV[i + 1]
  redis.call('HDEL', KEYS[3], id)
  if entry ~= '' then
    if redis.pcall('XACK', KEYS[2], GROUP, entry) ~= 1 then missing = missing + 1 end
    redis.call('XDEL', KEYS[2], entry)
  end
end
redis.call('HSET', KEYS[1], 'step', ARGV[2], 'settled', ARGV[3])
if missing > 0 then return 'lost' end
return 'done'
