-- status: what is known of a job, without its record, and about its place if it waits: as if all the
-- tenants that wait in its lane had equal weights and as many jobs as its own has before it.
-- KEYS  job, lane, returned
-- ARGV  fields..., at most to be counted
-- -> {field values, now_ms, its place, from 1 (-1: it doesn't wait or is too far back)} | {}: unknown
local counted = tonumber(ARGV[#ARGV])
local fields = redis.call('HMGET', KEYS[1], unpack(ARGV, 1, #ARGV - 1))
local state, entry, returned, tenant =
  unpack(redis.call('HMGET', KEYS[1], 'state', 'entry', 'returned', 'tenant'))
if not state then return {} end
-- -> how many entries wait in a stream, and behind which
local function waiting(stream)
  local length, claimed, delivered = redis.call('XLEN', stream), 0, '0-0'
  if length == 0 then return 0, delivered end
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    for at = 1, #group, 2 do
      if group[at] == 'last-delivered-id' then delivered = group[at + 1] end
      if group[at] == 'pending' then claimed = group[at + 1] end
    end
  end
  return length - claimed, delivered
end
local place = -1
if state == 'queued' then
  local handed_back, delivered = waiting(KEYS[3])
  if returned == '1' then
    place = #redis.call('XRANGE', KEYS[3], '(' .. delivered, entry, 'COUNT', counted)
  else
    local before = redis.call('ZRANK', KEYS[2] .. ':tenant:' .. (tenant or ''), entry)
    if before then
      local tenants = redis.call('ZCARD', KEYS[2] .. ':tenants')
      place = handed_back + math.min((before + 1) * tenants, (waiting(KEYS[2])))
    end
  end
  if place >= counted then place = -1 end
end
local now = redis.call('TIME')
return {fields, now[1] * 1000 + math.floor(now[2] / 1000), place}
