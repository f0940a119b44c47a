-- enqueue: the beginning of every job, shared by the scripts that may give it.
-- Writes the lane's entry and the job's hash and gives both a TTL. -> entry
local function enqueue(job, lane, id, record, lane_name, timeout_ms, result_ttl_ms, lane_ttl_ms)
  local now = redis.call('TIME')
  local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  local entry = redis.call('XADD', lane, '*', 'j', id)
  redis.call('HSET', job, 'id', id, 'state', 'queued', 'rec', record, 'lane', lane_name,
    'entry', entry, 'returned', 0, 'base', 0, 'attempts', 0, 'strikes', 0, 'history', '',
    'submitted', now_ms, 'deadline', now_ms + timeout_ms)
  redis.call('PEXPIRE', job, timeout_ms + result_ttl_ms)
  redis.call('PEXPIRE', lane, lane_ttl_ms)
  return entry
end
