-- status: what is known of a job, without its record, and its place if it waits.
-- KEYS  job, lane, returned
-- ARGV  fields..., at most to be counted
-- -> {field values, now_ms, entries that are claimed before it (-1: not known)} | {}: unknown
local counted = tonumber(ARGV[#ARGV])
local fields = redis.call('HMGET', KEYS[1], unpack(ARGV, 1, #ARGV - 1))
local state, entry, returned = unpack(redis.call('HMGET', KEYS[1], 'state', 'entry', 'returned'))
if not state then return {} end
local function waiting(stream, last)
  if redis.call('EXISTS', stream) == 0 then return 0 end
  local delivered = '0-0'
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    for at = 1, #group, 2 do
      if group[at] == 'last-delivered-id' then delivered = group[at + 1] end
    end
  end
  return #redis.call('XRANGE', stream, '(' .. delivered, last, 'COUNT', counted)
end
local place = -1
if state == 'queued' then
  place = returned == '1' and waiting(KEYS[3], entry) or waiting(KEYS[3], '+') + waiting(KEYS[2], entry)
  if place >= counted then place = -1 end
end
local now = redis.call('TIME')
return {fields, now[1] * 1000 + math.floor(now[2] / 1000), place}
