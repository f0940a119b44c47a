-- remember: which job answers an idempotency key, and for which request.
-- KEYS  request
-- ARGV  fingerprint of the request, job, ttl_ms, job to be replaced ('': none)
-- -> {'new'} | {'same', job} | {'conflict'}
local known = redis.call('GET', KEYS[1])
if known then
  local fingerprint, job = string.match(known, '^(%S+) (%S+)$')
  if fingerprint ~= ARGV[1] then return {'conflict'} end
  if job ~= ARGV[4] then return {'same', job} end
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[3])
return {'new'}
