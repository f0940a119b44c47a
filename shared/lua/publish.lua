-- publish: append frames of running jobs to their logs and channels, if the writer still owns them.
-- Sending the same frames again is harmless: those already in the log are skipped.
-- A frame comes as its message, `<seq> <owner> <base> <body>`: nothing is put together here.
-- KEYS  (job, log) per job
-- ARGV  per job: owner, channel, first seq, count, messages...
-- -> per job {'ok' | 'cancelled' | 'expired', seq} | {'fenced', 0} | {'gap', seq}; seq is the log's last
local replies = {}
local at = 1
for index = 1, #KEYS, 2 do
  local job, log = KEYS[index], KEYS[index + 1]
  local channel, first, count = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local owner, cancel = unpack(redis.call('HMGET', job, 'owner', 'cancel'))
  local seq = redis.call('XLEN', log)
  if owner ~= ARGV[at] then
    replies[#replies + 1] = {'fenced', 0}
  elseif first > seq + 1 then
    replies[#replies + 1] = {'gap', seq}
  else
    local last = first + count - 1
    for n = seq + 1, last do
      local message = ARGV[at + 4 + n - first]
      redis.call('XADD', log, n .. '-0', 'f', message)
      redis.call('PUBLISH', channel, message)
    end
    -- The log lives as long as its job: one that outlived it would refuse the frames of the next.
    if seq == 0 then redis.call('PEXPIRE', log, math.max(redis.call('PTTL', job), 1)) end
    replies[#replies + 1] = {cancel or 'ok', math.max(seq, last)}
  end
  at = at + 4 + count
end
return replies
