-- hand_back: give a job that was adopted back to the pool, without blame.
-- KEYS  job, lane, returned
-- ARGV  id, owner, lane_ttl_ms
-- -> {'ok'} | {'fenced'}
local owner, entry, returned = unpack(redis.call('HMGET', KEYS[1], 'owner', 'entry', 'returned'))
if owner ~= ARGV[2] then return {'fenced'} end
local stream = KEYS[returned == '1' and 3 or 2]
redis.call('XACK', stream, 'workers', entry)
redis.call('XDEL', stream, entry)
local back = redis.call('XADD', KEYS[3], '*', 'j', ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('HSET', KEYS[1], 'state', 'queued', 'entry', back, 'returned', 1)
redis.call('HDEL', KEYS[1], 'owner', 'worker')
redis.call('HINCRBY', KEYS[1], 'attempts', -1)
return {'ok'}
