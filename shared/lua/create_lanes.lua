-- create_lanes: make the consumer groups, at 0 so that nothing that waits is passed over.
-- A script only because its commands are refused at maxmemory, where a worker that has lost its link
-- for a moment must be able to come back.
-- KEYS  streams
-- ARGV  lane_ttl_ms
-- -> number of groups that were missing
local made = 0
for _, stream in ipairs(KEYS) do
  local reply = redis.pcall('XGROUP', 'CREATE', stream, 'workers', '0', 'MKSTREAM')
  if not reply.err then
    made = made + 1
  elseif not string.find(tostring(reply.err), 'BUSYGROUP', 1, true) then
    return reply
  end
  redis.call('PEXPIRE', stream, ARGV[1])
end
return made
