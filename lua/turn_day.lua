#!lua flags=allow-oom
-- Moves the current day of one shard to the day of TIME, never back, and notes the last mailbox_seq of the day that
-- ends; without a day yet, a shard has skipped at most. Of the days that are too old to read, the newest stays: its
-- last mailbox_seq is the floor.
-- Returns the shard's day, or STALE_OWNER; 0 when the shard was never initialised.
local owner, watermarks, days = KEYS[1], KEYS[2], KEYS[3]
local slot  = ARGV[1]           -- field of owner and mboxw
local epoch = ARGV[2]           -- 8 bytes
local keep  = tonumber(ARGV[3]) -- days before the current one that can be read
if (redis.call('HGET', owner, slot) or ''):sub(1, 8) ~= epoch then return 'STALE_OWNER' end
local state = redis.call('HGET', watermarks, slot)
if not state then return 0 end
local w, _, day = struct.unpack('>I8I8I4', state)
local today = math.floor(redis.call('TIME')[1] / 86400)
if day >= today then return day end
local floor_day, old = 0, {}
local noted = redis.call('HKEYS', days)
noted[#noted + 1] = tostring(day)
for _, name in ipairs(noted) do
  local noted_day = tonumber(name)
  if today - noted_day > keep then floor_day = math.max(floor_day, noted_day) end
end
for _, name in ipairs(noted) do
  if tonumber(name) < floor_day then old[#old + 1] = name end
end
if w > 0 and day > 0 then redis.call('HSET', days, day, string.format('%.0f', w)) end
if #old > 0 then redis.call('HDEL', days, unpack(old)) end
redis.call('HSET', watermarks, slot, state:sub(1, 16) .. struct.pack('>I4', today) .. state:sub(21))
return today
