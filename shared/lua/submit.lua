-- submit: put a job into its lane, once.
-- KEYS  job, lane, cancel
-- ARGV  id, record, lane name, limit (entries in the lane), timeout_ms, result_ttl_ms, lane_ttl_ms
-- -> {'queued', entry} | {'known', state} | {'cancelled'} | {'full', entries}
if redis.call('EXISTS', KEYS[3]) == 1 then return {'cancelled'} end
local state = redis.call('HGET', KEYS[1], 'state')
if state then return {'known', state} end
local entries = redis.call('XLEN', KEYS[2])
if entries >= tonumber(ARGV[4]) then return {'full', entries} end
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local entry = redis.call('XADD', KEYS[2], '*', 'j', ARGV[1])
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'state', 'queued', 'rec', ARGV[2], 'lane', ARGV[3],
  'entry', entry, 'returned', 0, 'seq', 0, 'base', 0, 'attempts', 0, 'strikes', 0, 'history', '',
  'submitted', now_ms, 'deadline', now_ms + ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[5] + ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[7])
return {'queued', entry}
