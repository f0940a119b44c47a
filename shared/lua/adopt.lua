-- adopt: become the owner of a job, or end it if it must not run.
-- With min_idle_ms the entry is another's, who has let its lease lapse: take it over, atomically only
-- if it still is that idle. An owner that was lost without having written anything is a strike against
-- the job; one that made progress leaves it with the single strike of its own loss.
-- KEYS  job, log, stream (where the entry is), dead
-- ARGV  entry, owner, worker, channel, result_ttl_ms, expired body, cancelled body, poisoned body,
--       min_idle_ms (0: the entry was claimed for this worker), max_strikes, dead_length, dead_ttl_ms
-- -> {'adopted', record, attempts, seq, left_ms, waited_ms, strikes, readers}
--    | {'expired'} | {'cancelled'} | {'poisoned'} | {'gone'} | {'held'}
if ARGV[9] ~= '0' and #redis.call('XCLAIM', KEYS[3], 'workers', ARGV[3], ARGV[9], ARGV[1], 'JUSTID') == 0
then return {'held'} end
local state, entry, base, deadline, submitted, cancel, strikes, history, readers, unread,
  patience = unpack(redis.call('HMGET', KEYS[1], 'state', 'entry', 'base', 'deadline',
  'submitted', 'cancel', 'strikes', 'history', 'readers', 'unread', 'patience'))
if not state or state == 'done' or entry ~= ARGV[1] then
  redis.call('XACK', KEYS[3], 'workers', ARGV[1])
  redis.call('XDEL', KEYS[3], ARGV[1])
  return {'gone'}
end
local seq = redis.call('XLEN', KEYS[2])
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
if state == 'running' and ARGV[9] ~= '0' then
  strikes = seq > tonumber(base) and 1 or strikes + 1
end
local abandoned = unread and patience ~= '-1' and now_ms >= unread + patience
local outcome = cancel or (now_ms >= tonumber(deadline) and 'expired')
  or (abandoned and 'cancelled')
  or (tonumber(strikes) >= tonumber(ARGV[10]) and 'poisoned')
if outcome then
  if outcome == 'poisoned' then
    redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[11], '*', 'j', redis.call('HGET', KEYS[1],
      'id'), 'rec', redis.call('HGET', KEYS[1], 'rec'), 'history', history)
    redis.call('PEXPIRE', KEYS[4], ARGV[12])
  end
  local body = ARGV[outcome == 'expired' and 6 or outcome == 'poisoned' and 8 or 7]
  end_job(KEYS[1], KEYS[2], KEYS[3], ARGV[4], '-', seq, seq + 1, body,
    outcome == 'poisoned' and 'failed' or outcome, '', ARGV[5])
  return {outcome}
end
redis.call('HSET', KEYS[1], 'state', 'running', 'owner', ARGV[2], 'worker', ARGV[3], 'base', seq,
  'started', now_ms, 'strikes', strikes, 'history', history .. now_ms .. ' ' .. ARGV[3] .. '\n')
local attempts = redis.call('HINCRBY', KEYS[1], 'attempts', 1)
return {'adopted', redis.call('HGET', KEYS[1], 'rec'), attempts, seq,
  tonumber(deadline) - now_ms, now_ms - submitted, tonumber(strikes), readers or ''}
