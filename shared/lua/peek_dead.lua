-- peek_dead: a page of the dead-letter, without the jobs' bodies.
-- KEYS  dead
-- ARGV  start (as of XRANGE), count
-- -> {{entry, job id, record with an empty body, length of the body, history}, ...}
local page = {}
for _, one in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  local record, length = without_body(one[2][4])
  page[#page + 1] = {one[1], one[2][2], record, length, one[2][6]}
end
return page
