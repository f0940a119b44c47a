-- enqueue: the beginning of every job, shared by the scripts that may give it.
-- Writes the lane's entry, its place among its tenant's, the job's hash, and gives all a TTL; a tenant
-- that had nothing there begins at the lane's virtual time, the least of its tenants' times.
-- The keys of tenants begin with the lane's, which is declared, and so are in its slot. -> entry
local function enqueue(job, lane, id, record, lane_name, timeout_ms, result_ttl_ms, lane_ttl_ms,
  tenant, weight)
  local now = redis.call('TIME')
  local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  local entry = redis.call('XADD', lane, '*', 'j', id, 'w', weight, 't', tenant)
  local own, tenants, waiting = lane .. ':tenant:' .. tenant, lane .. ':tenants', lane .. ':waiting'
  local ms, number = string.match(entry, '(%d+)-(%d+)')
  local age = string.format('%.0f', ms * 1024 + number)
  redis.call('ZADD', own, age, entry)
  redis.call('ZADD', waiting, age, entry)
  if not redis.call('ZSCORE', tenants, tenant) then
    local first = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
    redis.call('ZADD', tenants, first[2] or '0', tenant)
  end
  redis.call('HSET', job, 'id', id, 'state', 'queued', 'rec', record, 'lane', lane_name,
    'entry', entry, 'returned', 0, 'base', 0, 'attempts', 0, 'strikes', 0, 'history', '',
    'submitted', now_ms, 'deadline', now_ms + timeout_ms, 'tenant', tenant)
  redis.call('PEXPIRE', job, timeout_ms + result_ttl_ms)
  for _, key in ipairs({lane, own, tenants, waiting}) do redis.call('PEXPIRE', key, lane_ttl_ms) end
  ring(lane, lane_ttl_ms)
  return entry
end
