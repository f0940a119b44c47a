-- adopt: become the owner of a claimed job, or end it if it must not run.
-- KEYS  job, log, stream (where the entry was claimed)
-- ARGV  entry, owner, worker, channel, result_ttl_ms, expired body, cancelled body
-- -> {'adopted', record, attempts, seq, left_ms, waited_ms} | {'expired'} | {'cancelled'} | {'gone'}
local state, entry, seq, deadline, submitted, cancel =
  unpack(redis.call('HMGET', KEYS[1], 'state', 'entry', 'seq', 'deadline', 'submitted', 'cancel'))
if not state or state == 'done' or entry ~= ARGV[1] then
  redis.call('XACK', KEYS[3], 'workers', ARGV[1])
  redis.call('XDEL', KEYS[3], ARGV[1])
  return {'gone'}
end
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
if not cancel and now_ms >= tonumber(deadline) then cancel = 'expired' end
if cancel then
  end_job(KEYS[1], KEYS[2], KEYS[3], ARGV[4], '-', seq, seq + 1,
    ARGV[cancel == 'expired' and 6 or 7], cancel, '', ARGV[5])
  return {cancel}
end
redis.call('HSET', KEYS[1], 'state', 'running', 'owner', ARGV[2], 'worker', ARGV[3], 'base', seq,
  'started', now_ms)
local attempts = redis.call('HINCRBY', KEYS[1], 'attempts', 1)
return {'adopted', redis.call('HGET', KEYS[1], 'rec'), attempts, tonumber(seq),
  tonumber(deadline) - now_ms, now_ms - submitted}
