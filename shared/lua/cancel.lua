-- cancel: end a queued job; ask the owner of a running one to end it, or end it over its head.
-- KEYS  job, log, cancel, lane, returned
-- ARGV  id, channel, control prefix, reason ('cancelled' | 'expired'), body, result_ttl_ms,
--       force ('1': end a running job here), early_ttl_ms (above 0: also before its submission)
-- -> {'queued'} | {'running', worker} | {'forced'} | {'finished', outcome, usage} | {'unknown'}
local state, owner, worker, returned, outcome, usage = unpack(redis.call('HMGET', KEYS[1],
  'state', 'owner', 'worker', 'returned', 'outcome', 'usage'))
if not state then
  if tonumber(ARGV[8]) > 0 then redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[8]) end
  return {'unknown'}
end
if state == 'done' then return {'finished', outcome, usage} end
if state == 'running' and ARGV[7] ~= '1' then
  redis.call('HSETNX', KEYS[1], 'cancel', ARGV[4])
  redis.call('PUBLISH', ARGV[3] .. worker, 'cancel ' .. ARGV[1] .. ' ' .. owner .. ' ' .. ARGV[4])
  return {'running', worker}
end
local seq = redis.call('XLEN', KEYS[2])
end_job(KEYS[1], KEYS[2], KEYS[returned == '1' and 5 or 4], ARGV[2], '-', seq, seq + 1, ARGV[5],
  ARGV[4], '', ARGV[6])
return {state == 'queued' and 'queued' or 'forced'}
