-- claim: take entries for a worker, the more urgent stream first.
-- A single XREADGROUP over several streams takes COUNT from each of them: that is no priority.
-- KEYS  streams, the most urgent first
-- ARGV  worker, then per stream: the most to have claimed altogether once it has been read
-- -> {{index of the stream from 1, entry, job id}, ...}
local claimed = {}
for index, stream in ipairs(KEYS) do
  local left = tonumber(ARGV[index + 1]) - #claimed
  if left > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', 'workers', ARGV[1], 'COUNT', left,
      'STREAMS', stream, '>')
    if reply then
      for _, entry in ipairs(reply[1][2]) do
        claimed[#claimed + 1] = {index, entry[1], entry[2] and entry[2][2] or ''}
      end
    end
  end
end
return claimed
