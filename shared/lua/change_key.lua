-- change_key: put an API key's record in the place of another, or of none, if that is still there.
-- KEYS  api keys
-- ARGV  id, record as it was ('': none), new record ('': none)
-- -> 1 | 0: it has changed meanwhile
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
