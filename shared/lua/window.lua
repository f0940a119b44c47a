-- window: what an API key uses of a limit per minute, shared by the scripts that look and that count.
-- A hash: second → what it has brought, `used`: their sum, `last`: the newest, `swept`: the second in
-- which those were last taken out that are over, which they are a minute after their end. So no
-- 60 seconds ever hold more than they may, and all seconds are read but once in each.
local now = redis.call('TIME')
local now_s = tonumber(now[1])
local now_ms = now_s * 1000 + math.floor(now[2] / 1000)
local function gone_ms(second) return (second + 61) * 1000 - now_ms end
local function count(key, amount, ttl_ms)
  redis.call('HINCRBY', key, now_s, amount)
  redis.call('HINCRBY', key, 'used', amount)
  redis.call('HSET', key, 'last', now_s)
  redis.call('PEXPIRE', key, ttl_ms)
end
local function room_ms(key, used, limit)
  local seconds, counts, flat = {}, {}, redis.call('HGETALL', key)
  for at = 1, #flat, 2 do
    local second = tonumber(flat[at])
    if second then
      seconds[#seconds + 1] = second
      counts[second] = flat[at + 1]
    end
  end
  table.sort(seconds)
  for _, second in ipairs(seconds) do
    used = used - counts[second]
    if used < limit then return gone_ms(second) end
  end
  return 0
end
local function sweep(key, used)
  local flat = redis.call('HGETALL', key)
  for at = 1, #flat, 2 do
    local second = tonumber(flat[at])
    if second and second < now_s - 60 then
      redis.call('HDEL', key, flat[at])
      used = used - flat[at + 1]
    end
  end
  redis.call('HSET', key, 'used', used, 'swept', now_s)
  return used
end
-- -> used, ms until there is room (0: there is), ms until nothing is used
local function look(key, limit)
  if limit == 0 then return 0, 0, 0 end
  local used, last, swept = unpack(redis.call('HMGET', key, 'used', 'last', 'swept'))
  if not used then return 0, 0, 0 end
  used = tonumber(used)
  if swept ~= now[1] then used = sweep(key, used) end
  return used, used >= limit and room_ms(key, used, limit) or 0, used > 0 and gone_ms(last) or 0
end
