#!lua flags=allow-oom
-- Claims slots for a worker process, refreshes its claim, or releases it. All slots of a claim or none.
-- Same boot id: same epoch, new stamp. Another boot id: epoch + 1, unless the slot is held.
-- A refresh is refused wherever its boot id does not own the slot now: one that arrives late takes nothing back.
-- claim, refresh -> {1, epoch, epoch ...} in the order of the slots, or {0, slot, reason, label, slot ...}:
--   'fresh' another supervisor stamped it within fresh_ms; 'placement' other map, not released; 'lost' not refreshed
-- release -> number of slots released; slots of another boot id are left alone
local owner      = KEYS[1]             -- hash: slot -> epoch 8 | boot 16 | supervisor 16 | placement 16 | stamp 8
                                       --               | released 1 | label
local mode       = ARGV[1]             -- 'claim', 'refresh' or 'release'
local boot       = ARGV[2]             -- 16 bytes, one per worker process
local supervisor = ARGV[3]             -- 16 bytes, one per supervisor process
local placement  = ARGV[4]             -- 16 bytes, digest of the map
local label      = ARGV[5]             -- host name of the claimant
local take_over  = ARGV[6] == '1'      -- the operator's word that the other supervisor is dead
local fresh_ms   = tonumber(ARGV[7])   -- age below which a stamp protects its owner
local slots      = {unpack(ARGV, 8)}   -- slot numbers

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stored = redis.call('HMGET', owner, unpack(slots))

local function refusal(value, mine)
  if mode == 'refresh' then
    return not (mine and string.byte(value, 65) == 0) and 'lost'
  elseif not value or mine or take_over or string.byte(value, 65) == 1
      or string.sub(value, 25, 40) == supervisor then
    return nil
  elseif now - struct.unpack('>I8', value, 57) < fresh_ms then
    return 'fresh'
  elseif string.sub(value, 41, 56) ~= placement then
    return 'placement'
  end
end

local writes, epochs, refusals = {}, {1}, {0}
for i, slot in ipairs(slots) do
  local value = stored[i]
  local mine = value and string.sub(value, 9, 24) == boot
  local epoch = value and struct.unpack('>I8', value, 1) + (mine and 0 or 1) or 1
  local reason = mode ~= 'release' and refusal(value, mine)
  if mode == 'release' and mine then
    writes[#writes + 1] = slot
    writes[#writes + 1] = string.sub(value, 1, 64) .. '\1' .. string.sub(value, 66)
  elseif reason then
    table.insert(refusals, slot)
    table.insert(refusals, reason)
    table.insert(refusals, string.sub(value or '', 66))
  elseif mode ~= 'release' then
    epochs[#epochs + 1] = epoch
    writes[#writes + 1] = slot
    writes[#writes + 1] = struct.pack('>I8', epoch) .. boot .. supervisor .. placement
      .. struct.pack('>I8', now) .. '\0' .. label
  end
end
if #refusals > 1 then return refusals end
if #writes > 0 then redis.call('HSET', owner, unpack(writes)) end
return mode ~= 'release' and epochs or #writes / 2
