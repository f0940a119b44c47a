-- finish: the owner ends its job with the terminal frame.
-- KEYS  job, log, lane, returned
-- ARGV  owner, channel, seq, body, outcome, usage, result_ttl_ms
-- -> {'ok'} | {'fenced'} | {'gap', seq}; a finish whose reply was lost may be sent again
local owner, base, returned, ended_by =
  unpack(redis.call('HMGET', KEYS[1], 'owner', 'base', 'returned', 'ended_by'))
local seq = redis.call('XLEN', KEYS[2])
if ended_by == ARGV[1] then return {'ok'} end
if owner ~= ARGV[1] then return {'fenced'} end
if tonumber(ARGV[3]) ~= seq + 1 then return {'gap', seq} end
end_job(KEYS[1], KEYS[2], KEYS[returned == '1' and 4 or 3], ARGV[2], ARGV[1], base, ARGV[3],
  ARGV[4], ARGV[5], ARGV[6], ARGV[7])
return {'ok'}
