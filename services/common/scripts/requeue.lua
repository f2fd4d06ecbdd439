-- Operator: a dead letter goes back, while nobody has taken the tombstone that told of it: the entry as it came to the stream that it
-- came from; or (`anew`) only the tombstone changes, to `requeued`, so that the prompt is due again at no cost of a try.
-- KEYS dead last source outstanding clock; ARGV letter call n anew
-- `last` is where the tombstone waits, samples or evals. `call` names this very call, so that its repetition answers done. Answers
-- done, gone (no such letter), or settled: the trainer has taken the tombstone, or dropped the group, and the letter stays.
if redis.call('HGET', KEYS[5], 'requeued') == ARGV[2] then return 'done' end
local letter = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not letter then return 'gone' end
local field = {}
for i = 1, #letter[2], 2 do field[letter[2][i]] = letter[2][i + 1] end
local tombstone = field['tombstone'] or ''
if tombstone == '' or #redis.call('XRANGE', KEYS[2], tombstone, tombstone) == 0 then return 'settled' end
local pending = redis.pcall('XPENDING', KEYS[2], GROUP, tombstone, tombstone, 1)
if not pending.err and #pending > 0 then return 'settled' end
local tracked = string.sub(field['stream'], 1, 4) ~= 'eval'
local place = redis.call('HGET', KEYS[4], field['id'])
if tracked and not place then return 'settled' end
redis.call('XDEL', KEYS[2], tombstone)
local stage = field['stream']
if ARGV[4] == '1' then
  stage = 'samples'
  redis.call('XADD', KEYS[2], '*', 'id', field['id'], 'n', '0', 'reason', 'requeued')
else
  redis.call('XADD', KEYS[3], '*', 'id', field['id'], 'n', ARGV[3], 'data', field['data'])
end
if tracked then
  local _, began = split(place)
  redis.call('HSET', KEYS[4], field['id'], stage .. ':~requeued:' .. ARGV[1] .. '|' .. began .. '|')
end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('HINCRBY', KEYS[5], 'dead_bytes', -#field['data'])
redis.call('HSET', KEYS[5], 'requeued', ARGV[2])
return 'done'
