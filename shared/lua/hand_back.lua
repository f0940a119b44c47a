-- hand_back: the owner gives its job back to the pool, which claims it before its lane.
-- With blame (its engine failed while it ran) the job gets a strike, as if its worker had been lost.
-- One that was never begun here leaves no line in the job's history.
-- KEYS  job, lane, returned, log
-- ARGV  id, owner, lane_ttl_ms, blame ('1' or '0'), begun ('1' or '0')
-- -> {'ok'} | {'fenced'}
local owner, entry, returned, base, strikes, history = unpack(redis.call('HMGET', KEYS[1],
  'owner', 'entry', 'returned', 'base', 'strikes', 'history'))
if owner ~= ARGV[2] then return {'fenced'} end
local stream = KEYS[returned == '1' and 3 or 2]
redis.call('XACK', stream, 'workers', entry)
redis.call('XDEL', stream, entry)
local back = redis.call('XADD', KEYS[3], '*', 'j', ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
ring(KEYS[3], ARGV[3])
if ARGV[4] == '1' then
  strikes = redis.call('XLEN', KEYS[4]) > tonumber(base) and 1 or strikes + 1
else
  redis.call('HINCRBY', KEYS[1], 'attempts', -1)
end
if ARGV[5] == '0' then history = string.gsub(history, '[^\n]*\n$', '') end
redis.call('HSET', KEYS[1], 'state', 'queued', 'entry', back, 'returned', 1, 'strikes', strikes,
  'history', history)
redis.call('HDEL', KEYS[1], 'owner', 'worker')
return {'ok'}
