#!lua flags=no-writes
-- One page of a conversation's hot history, newest first: only up to the visible head, only above the floor.
-- Returns {head, floor, 1 = more lies in the direction of the walk, last sequence looked at, seq, record ...}.
-- Without `after` it walks down from `before` (or the head), with `after` up from it. A sequence without a
-- record was collected and is passed over; a call looks at SCAN_MAX sequences, so it may find none and say more.
local conversation = KEYS[1]             -- hash: h visible head
local records      = KEYS[2]             -- hash: sequence -> record
local floors       = KEYS[3]             -- hash: conversation -> all at or below it is in the archive only
local floor_field  = ARGV[1]
local before       = tonumber(ARGV[2])   -- exclusive; 0 = not given
local after        = tonumber(ARGV[3])   -- exclusive; 0 = not given
local entries_max  = tonumber(ARGV[4])
local bytes_max    = tonumber(ARGV[5])
local CHUNK        = 64                  -- sequences looked up at once
local SCAN_MAX     = 4096                -- about a millisecond
local ENTRY_BYTES  = 16                  -- what an entry costs on the wire beside its record

local head  = tonumber(redis.call('HGET', conversation, 'h') or 0)
local floor = tonumber(redis.call('HGET', floors, floor_field) or 0)
local high  = before > 0 and math.min(head, before - 1) or head
local low   = math.max(floor, after) + 1
local seq, step = high, -1
if after > 0 then
  seq, step = low, 1
end

local found, bytes, scanned, is_full = {}, 0, 0, false
while seq >= low and seq <= high and not is_full and scanned < SCAN_MAX do
  local wanted = {}
  while #wanted < CHUNK and seq >= low and seq <= high do
    wanted[#wanted + 1] = string.format('%d', seq)
    seq = seq + step
  end
  scanned = scanned + #wanted
  local chunk = redis.call('HMGET', records, unpack(wanted))
  for i, text in ipairs(wanted) do
    local record = chunk[i]
    if record and #found > 0 and (#found >= 2 * entries_max or bytes + #record + ENTRY_BYTES > bytes_max) then
      is_full = true
      break
    elseif record then
      bytes = bytes + #record + ENTRY_BYTES
      found[#found + 1] = text
      found[#found + 1] = record
    end
  end
end

local more = is_full or (seq >= low and seq <= high)
local answer, first, last = { head, floor, more and 1 or 0, seq - step }, 1, #found - 1
if step > 0 then
  first, last = last, first
end
for i = first, last, -2 * step do
  answer[#answer + 1] = found[i]
  answer[#answer + 1] = found[i + 1]
end
return answer
