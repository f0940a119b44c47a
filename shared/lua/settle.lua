-- settle: take jobs that are over out of what their API key has in flight, and charge their tokens.
-- A job is charged by whoever takes it out of the unsettled: once, however many try.
-- KEYS  in flight, unsettled, tokens
-- ARGV  window_ttl_ms, then per job: id, tokens (-1: not known yet, it stays unsettled)
-- -> tokens charged
local charged = 0
for at = 2, #ARGV, 2 do
  redis.call('HDEL', KEYS[1], ARGV[at])
  local tokens = tonumber(ARGV[at + 1])
  if tokens >= 0 and redis.call('HDEL', KEYS[2], ARGV[at]) == 1 then charged = charged + tokens end
end
if charged > 0 then count(KEYS[3], charged, ARGV[1]) end
return charged
