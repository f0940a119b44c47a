-- beat: renew the lease on the jobs that a worker owns, and learn which it must stop.
-- The owner is checked before the claim is renewed: a blind XCLAIM by a worker that was thought dead
-- would steal the job back.
-- KEYS  lane and returned of each lane in order of urgency, then one job per ARGV pair
-- ARGV  worker, number of lane keys, then per job: owner, index of its stream in KEYS from 1
-- -> per job 'ok' | 'cancelled' | 'expired' | 'fenced'
local replies = {}
local lanes = tonumber(ARGV[2])
for index = lanes + 1, #KEYS do
  local at = 3 + (index - lanes - 1) * 2
  local owner, entry, cancel = unpack(redis.call('HMGET', KEYS[index], 'owner', 'entry', 'cancel'))
  if owner ~= ARGV[at] then
    replies[#replies + 1] = 'fenced'
  else
    redis.call('XCLAIM', KEYS[tonumber(ARGV[at + 1])], 'workers', ARGV[1], 0, entry, 'JUSTID')
    replies[#replies + 1] = cancel or 'ok'
  end
end
return replies
