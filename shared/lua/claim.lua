-- claim: take entries for a worker, the more urgent stream first.
-- In a lane it is the turn of the tenant with the least virtual time, which each entry that is taken
-- advances by 1 / weight; within a tenant the oldest comes first. What was handed back is read in order.
-- A tenant that has nothing left keeps its time until it is the least, so that it gains nothing by it.
-- XCLAIM with FORCE makes the pending entry; its idle time keeps what another worker holds with that.
-- The keys of tenants and bells begin with the declared streams', and so are in their slot.
-- KEYS  streams, the most urgent first
-- ARGV  worker, lane_ttl_ms, max_wait_ms, then per stream: the most to have claimed altogether once it
--       has been read; '1' for a lane, '0' for what was handed back; the most to have claimed from it
--       before all others, of what has waited there for longer than max_wait_ms
-- -> {{index of the stream from 1, entry, job id}, ...}
local NEVER_MS, LOOKS = '1000000000000', 100
local worker, ttl_ms = ARGV[1], ARGV[2]
local claimed, quiet = {}, {}

local function add(index, entry)
  claimed[#claimed + 1] = {index, entry[1], entry[2] and entry[2][2] or ''}
end

local function drop(stream, tenant, entry)
  redis.call('ZREM', stream .. ':tenant:' .. tenant, entry)
  redis.call('ZREM', stream .. ':waiting', entry)
end

local function advance(stream, tenant, entry)
  local weight = math.max(tonumber(entry[2][4]) or 1, 0.01)
  redis.call('ZINCRBY', stream .. ':tenants', string.format('%.9f', 1 / weight), tenant)
end

local function force(stream, entry)
  return redis.call('XCLAIM', stream, 'workers', worker, NEVER_MS, entry, 'FORCE')[1]
end

local function group_of(stream)
  local found = {}
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    for at = 1, #group, 2 do found[group[at]] = group[at + 1] end
  end
  return found
end

-- Entries that no tenant's set has, and no worker: of another version's writer, or of a lost group.
-- The group's last delivered id says how far they were looked for. -> whether no more can be there
local function unlisted(index, stream, most)
  local length = redis.call('XLEN', stream)
  if length == 0 then return true end
  local group = group_of(stream)
  if length <= (group['pending'] or 0) then return true end
  local from = group['last-delivered-id'] or '0-0'
  local page = redis.call('XRANGE', stream, '(' .. from, '+', 'COUNT', LOOKS)
  local last, taken = nil, 0
  for _, one in ipairs(page) do
    if taken == most then break end
    local entry = force(stream, one[1])
    if entry then
      add(index, entry)
      redis.call('ZREM', stream .. ':waiting', one[1])
      taken = taken + 1
    end
    last = one[1]
  end
  if last then redis.call('XGROUP', 'SETID', stream, 'workers', last) end
  return #page < LOOKS and (not last or last == page[#page][1])
end

-- -> whether nothing is left
local function fair(index, stream, most)
  local tenants, until_claimed = stream .. ':tenants', #claimed + most
  for _ = 1, most + LOOKS * 10 do
    if #claimed == until_claimed then return redis.call('EXISTS', tenants) == 0 end
    local tenant = redis.call('ZRANGE', tenants, 0, 0)[1]
    if not tenant then return unlisted(index, stream, until_claimed - #claimed) end
    local own = stream .. ':tenant:' .. tenant
    local oldest = redis.call('ZRANGE', own, 0, 0)[1]
    if oldest then
      local entry = force(stream, oldest)
      drop(stream, tenant, oldest)
      if entry then
        add(index, entry)
        advance(stream, tenant, entry)
      end
    else
      redis.call('ZREM', tenants, tenant)
    end
  end
  return false
end

local function in_order(index, stream, most)
  local reply = redis.call('XREADGROUP', 'GROUP', 'workers', worker, 'COUNT', most, 'STREAMS', stream,
    '>')
  local entries = reply and reply[1][2] or {}
  for _, entry in ipairs(entries) do add(index, entry) end
  return #entries < most
end

local function take(index, most)
  local stream = KEYS[index]
  local read = ARGV[2 + 3 * index] == '1' and fair or in_order
  if read(index, stream, most) then
    quiet[#quiet + 1] = stream .. ':bell'
  else
    ring(stream, ttl_ms)
  end
end

local now = redis.call('TIME')
local oldest_ms = now[1] * 1000 + math.floor(now[2] / 1000) - tonumber(ARGV[3])
local function overdue(entry) return entry and tonumber(string.match(entry, '^%d+')) < oldest_ms end

-- The oldest of a lane, whosever they are.
local function take_overdue(index, most)
  local stream, until_claimed = KEYS[index], #claimed + most
  for _ = 1, most + LOOKS do
    local oldest = redis.call('ZRANGE', stream .. ':waiting', 0, 0)[1]
    if #claimed == until_claimed or not overdue(oldest) then return end
    local entry = force(stream, oldest)
    local tenant = entry and entry[2][6] or ''
    drop(stream, tenant, oldest)
    if entry then
      add(index, entry)
      advance(stream, tenant, entry)
    end
  end
end

local function overdue_return(stream)
  if redis.call('XLEN', stream) == 0 then return false end
  local from = group_of(stream)['last-delivered-id'] or '0-0'
  local page = redis.call('XRANGE', stream, '(' .. from, '+', 'COUNT', 1)
  return page[1] and overdue(page[1][1])
end

for index = 1, #KEYS do
  local turn = tonumber(ARGV[3 + 3 * index]) - #claimed
  if turn > 0 then
    if ARGV[2 + 3 * index] == '1' then
      take_overdue(index, turn)
    elseif overdue_return(KEYS[index]) then
      take(index, turn)
    end
  end
end
for index = 1, #KEYS do
  local left = tonumber(ARGV[1 + 3 * index]) - #claimed
  if left > 0 then take(index, left) end
end
if #quiet > 0 then redis.call('DEL', unpack(quiet)) end
return claimed
