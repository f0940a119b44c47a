-- admit: count a request against its API key's limits, unless one of them is reached.
-- All or nothing: what is refused counts nowhere. A window holds what each second has brought, and a
-- second counts until a minute after its end, so that no 60 seconds ever hold more than they may.
-- KEYS  in flight, unsettled, requests, tokens
-- ARGV  job, ttl_ms, window_ttl_ms, then limits, 0 for none: in flight, requests and tokens per minute
-- -> {'ok' | 'in_flight' | 'requests' | 'tokens', then for requests and for tokens: used,
--     wait_ms (until there is room; 0: there is), reset_ms (until nothing is used)}
local now = redis.call('TIME')
local now_s = tonumber(now[1])
local now_ms = now_s * 1000 + math.floor(now[2] / 1000)
local function gone_ms(second) return (second + 61) * 1000 - now_ms end
local function window(key, limit)
  if limit == 0 then return 0, 0, 0 end
  local used, seconds, counts, last = 0, {}, {}, nil
  local flat = redis.call('HGETALL', key)
  for at = 1, #flat, 2 do
    local second, count = tonumber(flat[at]), tonumber(flat[at + 1])
    if second < now_s - 60 then
      redis.call('HDEL', key, flat[at])
    else
      used = used + count
      counts[second] = count
      seconds[#seconds + 1] = second
      last = math.max(last or second, second)
    end
  end
  local wait_ms = 0
  if used >= limit then
    table.sort(seconds)
    local left = used
    for _, second in ipairs(seconds) do
      left = left - counts[second]
      if left < limit then
        wait_ms = gone_ms(second)
        break
      end
    end
  end
  return used, wait_ms, last and gone_ms(last) or 0
end
local flying, per_minute, tokens = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local used, wait_ms, reset_ms = window(KEYS[3], per_minute)
local spent, broke_ms, refill_ms = window(KEYS[4], tokens)
local known = flying > 0 and redis.call('HGET', KEYS[1], ARGV[1])
local verdict = flying > 0 and not known and redis.call('HLEN', KEYS[1]) >= flying and 'in_flight'
  or wait_ms > 0 and wait_ms >= broke_ms and 'requests' or broke_ms > 0 and 'tokens' or 'ok'
if verdict == 'ok' then
  if flying > 0 and not known then
    redis.call('HSET', KEYS[1], ARGV[1], now_ms)
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  if per_minute > 0 then
    redis.call('HINCRBY', KEYS[3], now_s, 1)
    redis.call('PEXPIRE', KEYS[3], ARGV[3])
    used, reset_ms = used + 1, math.max(reset_ms, gone_ms(now_s))
  end
  if tokens > 0 then
    redis.call('HSETNX', KEYS[2], ARGV[1], now_ms)
    redis.call('PEXPIRE', KEYS[2], ARGV[2])
  end
end
return {verdict, used, wait_ms, reset_ms, spent, broke_ms, refill_ms}
