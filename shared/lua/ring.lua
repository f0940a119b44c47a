-- ring: wake one worker that waits for a stream's entries, shared by the scripts that add or leave some.
-- A bell is a list of at most one element: there is one, or a worker has just taken it and claims.
local function ring(stream, ttl_ms)
  local bell = stream .. ':bell'
  if redis.call('EXISTS', bell) == 1 then return end
  redis.call('RPUSH', bell, '1')
  redis.call('PEXPIRE', bell, ttl_ms)
end
