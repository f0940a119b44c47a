-- end_job: the last step of every job, shared by the scripts that may take it.
-- Writes the terminal frame to the log and the channel, deletes the lane's entry and its place
-- among its tenant's, frees the record and gives what stays a TTL. `stream` is the lane stream that
-- holds the job's entry; the keys of tenants begin with its name.
local function end_job(job, log, stream, channel, owner, base, seq, body, outcome, usage, ttl_ms)
  local message = seq .. ' ' .. owner .. ' ' .. base .. ' ' .. body
  redis.call('XADD', log, seq .. '-0', 'f', message)
  redis.call('PUBLISH', channel, message)
  local entry, state, tenant = unpack(redis.call('HMGET', job, 'entry', 'state', 'tenant'))
  redis.call('XACK', stream, 'workers', entry)
  redis.call('XDEL', stream, entry)
  if state == 'queued' then
    redis.call('ZREM', stream .. ':tenant:' .. (tenant or ''), entry)
    redis.call('ZREM', stream .. ':waiting', entry)
  end
  local now = redis.call('TIME')
  redis.call('HSET', job, 'state', 'done', 'outcome', outcome, 'ended_by', owner, 'usage', usage,
    'finished', now[1] * 1000 + math.floor(now[2] / 1000))
  redis.call('HDEL', job, 'rec', 'owner')
  redis.call('PEXPIRE', job, ttl_ms)
  redis.call('PEXPIRE', log, ttl_ms)
end
