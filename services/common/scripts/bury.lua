-- Trainer: an entry of `samples` that breaks the contract goes to the dead letters as it came; settle removes it afterwards.
-- KEYS samples dead clock; ARGV attempt consumer entry id reason data max_entries max_bytes
if fenced(KEYS[3], ARGV[1]) then return fenced(KEYS[3], ARGV[1]) end
local pending = redis.pcall('XPENDING', KEYS[1], GROUP, ARGV[3], ARGV[3], 1, ARGV[2])
local deliveries = (not pending.err and #pending == 1) and pending[1][4] or 0
local letter = {'id', ARGV[4], 'stream', 'samples', 'entry', ARGV[3], 'deliveries', deliveries, 'reason', ARGV[5], 'data', ARGV[6]}
bury(KEYS[2], KEYS[3], letter, ARGV[7], ARGV[8])
return 'done'
