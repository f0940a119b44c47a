-- admit: count a job among those that its API key has in flight, unless it has as many as it may.
-- KEYS  in flight
-- ARGV  job, limit, ttl_ms
-- -> 1 | 0: there are as many
if redis.call('HGET', KEYS[1], ARGV[1]) then return 1 end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], now[1] * 1000 + math.floor(now[2] / 1000))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
