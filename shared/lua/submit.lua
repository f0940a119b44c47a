-- submit: put a job into its lane, once, with its first reader if it has one.
-- KEYS  job, lane, cancel
-- ARGV  id, record, lane name, limit (entries in the lane), timeout_ms, result_ttl_ms, lane_ttl_ms,
--       model, stream ('1' or '0'), tenant, reader ('': none), patience_ms ('-1': for ever)
-- -> {'queued', entry} | {'known', state} | {'cancelled'} | {'full', entries, age_ms of the oldest}
if redis.call('EXISTS', KEYS[3]) == 1 then return {'cancelled'} end
local state = redis.call('HGET', KEYS[1], 'state')
if state then return {'known', state} end
local entries = redis.call('XLEN', KEYS[2])
if entries >= tonumber(ARGV[4]) then
  local now = redis.call('TIME')
  local oldest = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
  local since_ms = oldest and tonumber(string.match(oldest[1], '^%d+')) or math.huge
  local age_ms = now[1] * 1000 + math.floor(now[2] / 1000) - since_ms
  return {'full', entries, math.max(age_ms, 0)}
end
local entry = enqueue(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6], ARGV[7])
redis.call('HSET', KEYS[1], 'model', ARGV[8], 'stream', ARGV[9], 'tenant', ARGV[10])
if ARGV[11] ~= '' then redis.call('HSET', KEYS[1], 'readers', ARGV[11], 'patience', ARGV[12]) end
return {'queued', entry}
