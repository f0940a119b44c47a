-- without_body: a job's record with an empty body, and the body's length: for scripts that list jobs.
-- Bodies may be large, and hold what people have asked: neither is for a list. A record of a form that
-- isn't known becomes empty. In MessagePack a body is its name, a byte for the width of its length
-- (196: 1 byte, 197: 2, 198: 4), the length and the bytes.
local function without_body(record)
  local _, name = string.find(record, '\164body', 1, true)
  local width = name and ({[196] = 1, [197] = 2, [198] = 4})[string.byte(record, name + 1)]
  if not width then return '', 0 end
  local length = 0
  for at = name + 2, name + 1 + width do length = length * 256 + (string.byte(record, at) or 0) end
  return string.sub(record, 1, name) .. '\196\0' .. string.sub(record, name + 2 + width + length),
    length
end
