-- attach: somebody begins to read a job's answer, perhaps not the first.
-- KEYS  job, log
-- ARGV  reader, tenant (left out: anybody's job will do)
-- -> {state, outcome, lane, stream, left_ms (until its deadline), frames in its log} | {}: unknown
local state, outcome, lane, stream, deadline, readers, tenant = unpack(redis.call('HMGET', KEYS[1],
  'state', 'outcome', 'lane', 'stream', 'deadline', 'readers', 'tenant'))
if not state or ARGV[2] and ARGV[2] ~= (tenant or '') then return {} end
if state ~= 'done' and readers then
  if not string.find(' ' .. readers .. ' ', ' ' .. ARGV[1] .. ' ', 1, true) then
    redis.call('HSET', KEYS[1], 'readers', readers == '' and ARGV[1] or readers .. ' ' .. ARGV[1])
  end
  redis.call('HDEL', KEYS[1], 'unread')
end
local now = redis.call('TIME')
return {state, outcome or '', lane, stream or '0',
  deadline - now[1] * 1000 - math.floor(now[2] / 1000), redis.call('XLEN', KEYS[2])}
