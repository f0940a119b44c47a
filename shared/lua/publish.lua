-- publish: append frames of running jobs to their logs and channels, if the writer still owns them.
-- Sending the same frames again is harmless: those already in the log are skipped.
-- KEYS  (job, log) per job
-- ARGV  per job: owner, base, channel, first seq, count, bodies...
-- -> per job {'ok' | 'cancelled' | 'expired', seq} | {'fenced', 0} | {'gap', seq}; seq is the log's last
local replies = {}
local at = 1
for index = 1, #KEYS, 2 do
  local job, log = KEYS[index], KEYS[index + 1]
  local owner, base, channel = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local first, count = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  at = at + 5
  local owned_by, seq, cancel = unpack(redis.call('HMGET', job, 'owner', 'seq', 'cancel'))
  if owned_by ~= owner then
    replies[#replies + 1] = {'fenced', 0}
  elseif first > seq + 1 then
    replies[#replies + 1] = {'gap', tonumber(seq)}
  else
    local head = owner .. ' ' .. base .. ' '
    local last = tonumber(seq)
    for n = last + 1, first + count - 1 do
      local frame = head .. ARGV[at + n - first]
      redis.call('XADD', log, n .. '-0', 'f', frame)
      redis.call('PUBLISH', channel, n .. ' ' .. frame)
      last = n
    end
    redis.call('HSET', job, 'seq', last)
    -- The log lives as long as its job: one that outlived it would refuse the frames of the next.
    if seq == '0' then redis.call('PEXPIRE', log, math.max(redis.call('PTTL', job), 1)) end
    replies[#replies + 1] = {cancel or 'ok', last}
  end
  at = at + count
end
return replies
