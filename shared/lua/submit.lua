-- submit: put a job into its lane, once, with its first reader if it has one.
-- KEYS  job, lane, cancel
-- ARGV  id, record, lane name, limit (entries in the lane), timeout_ms, result_ttl_ms, lane_ttl_ms,
--       model, stream ('1' or '0'), tenant, reader ('': none), patience_ms ('-1': for ever)
-- -> {'queued', entry} | {'known', state} | {'cancelled'} | {'full', entries}
if redis.call('EXISTS', KEYS[3]) == 1 then return {'cancelled'} end
local state = redis.call('HGET', KEYS[1], 'state')
if state then return {'known', state} end
local entries = redis.call('XLEN', KEYS[2])
if entries >= tonumber(ARGV[4]) then return {'full', entries} end
local entry = enqueue(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6], ARGV[7])
redis.call('HSET', KEYS[1], 'model', ARGV[8], 'stream', ARGV[9], 'tenant', ARGV[10])
if ARGV[11] ~= '' then redis.call('HSET', KEYS[1], 'readers', ARGV[11], 'patience', ARGV[12]) end
return {'queued', entry}
