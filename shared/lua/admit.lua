-- admit: count a request against its API key's limits, unless one of them is reached.
-- All or nothing: what is refused counts nowhere.
-- KEYS  in flight, unsettled, requests, tokens
-- ARGV  job, ttl_ms, window_ttl_ms, then limits, 0 for none: in flight, requests and tokens per minute
-- -> {'ok' | 'in_flight' | 'requests' | 'tokens', then for requests and for tokens: used,
--     wait_ms (until there is room; 0: there is), reset_ms (until nothing is used)}
local flying, per_minute, tokens = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local used, wait_ms, reset_ms = look(KEYS[3], per_minute)
local spent, broke_ms, refill_ms = look(KEYS[4], tokens)
local known = flying > 0 and redis.call('HGET', KEYS[1], ARGV[1])
local verdict = flying > 0 and not known and redis.call('HLEN', KEYS[1]) >= flying and 'in_flight'
  or wait_ms > 0 and wait_ms >= broke_ms and 'requests' or broke_ms > 0 and 'tokens' or 'ok'
if verdict == 'ok' then
  if flying > 0 and not known then
    redis.call('HSET', KEYS[1], ARGV[1], now_ms)
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  if per_minute > 0 then
    count(KEYS[3], 1, ARGV[3])
    used, reset_ms = used + 1, gone_ms(now_s)
  end
  if tokens > 0 then
    redis.call('HSETNX', KEYS[2], ARGV[1], now_ms)
    redis.call('PEXPIRE', KEYS[2], ARGV[2])
  end
end
return {verdict, used, wait_ms, reset_ms, spent, broke_ms, refill_ms}
