-- submit: put a job into its lane, once, with its first reader if it has one.
-- KEYS  job, lane, cancel
-- ARGV  id, record, lane name, limit (entries in the lane), timeout_ms, result_ttl_ms, lane_ttl_ms,
--       model, stream ('1' or '0'), tenant, reader ('': none), patience_ms ('-1': for ever),
--       weight, tenant_limit (entries of the tenant's that wait; 0: none)
-- -> {'queued', entry} | {'known', state} | {'cancelled'}
--    | {'full' or, of its tenant, 'tenant_full', entries, age_ms of the oldest}
if redis.call('EXISTS', KEYS[3]) == 1 then return {'cancelled'} end
local state = redis.call('HGET', KEYS[1], 'state')
if state then return {'known', state} end
local function full(verdict, entries, oldest)
  local now = redis.call('TIME')
  local since_ms = oldest and tonumber(string.match(oldest, '^%d+')) or math.huge
  local age_ms = now[1] * 1000 + math.floor(now[2] / 1000) - since_ms
  return {verdict, entries, math.max(age_ms, 0)}
end
if tonumber(ARGV[14]) > 0 then
  local own = KEYS[2] .. ':tenant:' .. ARGV[10]
  local waiting = redis.call('ZCARD', own)
  if waiting >= tonumber(ARGV[14]) then
    return full('tenant_full', waiting, redis.call('ZRANGE', own, 0, 0)[1])
  end
end
local entries = redis.call('XLEN', KEYS[2])
if entries >= tonumber(ARGV[4]) then
  local oldest = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
  return full('full', entries, oldest and oldest[1])
end
local entry = enqueue(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6], ARGV[7],
  ARGV[10], ARGV[13])
redis.call('HSET', KEYS[1], 'model', ARGV[8], 'stream', ARGV[9])
if ARGV[11] ~= '' then redis.call('HSET', KEYS[1], 'readers', ARGV[11], 'patience', ARGV[12]) end
return {'queued', entry}
