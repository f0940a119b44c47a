-- leave: readers have gone. A job that nobody has read for longer than its patience is cancelled.
-- Called with no reader it only looks whether that time has come.
-- KEYS  job, log, lane, returned
-- ARGV  id, channel, control prefix, body, result_ttl_ms, doubtful ('1': they are only thought to
--       have gone, which a subscription to the channel disproves), readers...
-- -> {'read'} | {'waiting', ms} | {'kept'} | {'queued'} | {'running', worker} | {'finished'}
--    | {'unknown'}
local state, readers, unread, patience, owner, worker, returned = unpack(redis.call('HMGET',
  KEYS[1], 'state', 'readers', 'unread', 'patience', 'owner', 'worker', 'returned'))
if not state then return {'unknown'} end
if state == 'done' then return {'finished'} end
if not readers then return {'kept'} end
if ARGV[6] == '1' and redis.call('PUBSUB', 'NUMSUB', ARGV[2])[2] > 0 then return {'read'} end
local gone, left = {}, {}
for at = 7, #ARGV do gone[ARGV[at]] = true end
for reader in string.gmatch(readers, '%S+') do
  if not gone[reader] then left[#left + 1] = reader end
end
redis.call('HSET', KEYS[1], 'readers', table.concat(left, ' '))
if #left > 0 then return {'read'} end
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
if not unread then
  unread = now_ms
  redis.call('HSET', KEYS[1], 'unread', unread)
end
if patience == '-1' then return {'kept'} end
local wait_ms = unread + patience - now_ms
if wait_ms > 0 then return {'waiting', wait_ms} end
if state == 'running' then
  redis.call('HSETNX', KEYS[1], 'cancel', 'cancelled')
  redis.call('PUBLISH', ARGV[3] .. worker, 'cancel ' .. ARGV[1] .. ' ' .. owner .. ' cancelled')
  return {'running', worker}
end
local seq = redis.call('XLEN', KEYS[2])
end_job(KEYS[1], KEYS[2], KEYS[returned == '1' and 4 or 3], ARGV[2], '-', seq, seq + 1, ARGV[4],
  'cancelled', '', ARGV[5])
return {'queued'}
