-- announce: a worker says that it is there, until its lease ends.
-- A script so that it gets through at maxmemory: running work must finish.
-- KEYS  worker, workers, models
-- ARGV  id, record, lease_ms, workers_ttl_ms, models_ttl_ms, then per model: name, record
-- -> the record that stood there before, or false
local before = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
for at = 6, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[at], ARGV[at + 1]) end
if #ARGV > 5 then redis.call('PEXPIRE', KEYS[3], ARGV[5]) end
return before
