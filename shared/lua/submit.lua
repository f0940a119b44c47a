-- submit: put a job into its lane, once.
-- KEYS  job, lane, cancel
-- ARGV  id, record, lane name, limit (entries in the lane), timeout_ms, result_ttl_ms, lane_ttl_ms
-- -> {'queued', entry} | {'known', state} | {'cancelled'} | {'full', entries}
if redis.call('EXISTS', KEYS[3]) == 1 then return {'cancelled'} end
local state = redis.call('HGET', KEYS[1], 'state')
if state then return {'known', state} end
local entries = redis.call('XLEN', KEYS[2])
if entries >= tonumber(ARGV[4]) then return {'full', entries} end
return {'queued', enqueue(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6], ARGV[7])}
