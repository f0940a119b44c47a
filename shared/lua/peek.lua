-- peek: all that is kept of some jobs, but for their bodies.
-- KEYS  jobs
-- -> per job its fields and values, flat; none where there is no such job. `rec` has an empty body,
--    `body_bytes` says how long it was
local jobs = {}
for index, job in ipairs(KEYS) do
  local fields = redis.call('HGETALL', job)
  for at = 1, #fields, 2 do
    if fields[at] == 'rec' then
      local record, length = without_body(fields[at + 1])
      fields[at + 1] = record
      fields[#fields + 1] = 'body_bytes'
      fields[#fields + 1] = tostring(length)
    end
  end
  jobs[index] = fields
end
return jobs
