-- requeue: submit a job of the dead-letter again, under a new id and with a clean history.
-- The record is spliced here, not read and sent back: fields that the caller's version doesn't know
-- stay, and a large body doesn't travel. Both ids have the same length. The new job has no readers, so
-- that it isn't thought to be abandoned.
-- KEYS  new job, lane, dead
-- ARGV  entry (in dead), new id, lane name, timeout_ms, result_ttl_ms, lane_ttl_ms, model,
--       stream ('1' or '0'), tenant, weight
-- -> {'queued', entry} | {'gone'} | {'unreadable'}
local found = redis.call('XRANGE', KEYS[3], ARGV[1], ARGV[1])[1]
if not found then return {'gone'} end
local old, record = found[2][2], found[2][4]
local first, last = string.find(record, old, 1, true)
if not first or #old ~= #ARGV[2] then return {'unreadable'} end
record = string.sub(record, 1, first - 1) .. ARGV[2] .. string.sub(record, last + 1)
local entry = enqueue(KEYS[1], KEYS[2], ARGV[2], record, ARGV[3], ARGV[4], ARGV[5], ARGV[6],
  ARGV[9], ARGV[10])
redis.call('HSET', KEYS[1], 'model', ARGV[7], 'stream', ARGV[8])
redis.call('XDEL', KEYS[3], ARGV[1])
return {'queued', entry}
