-- readers: who reads the answers of some jobs.
-- KEYS  jobs
-- -> per job {readers, ms for which it has been unread for longer than its patience, or -1}
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local found = {}
for index, job in ipairs(KEYS) do
  local readers, unread, patience =
    unpack(redis.call('HMGET', job, 'readers', 'unread', 'patience'))
  local over_ms = -1
  if unread and patience and patience ~= '-1' then over_ms = now_ms - unread - patience end
  found[index] = {readers or '', math.max(over_ms, -1)}
end
return found
