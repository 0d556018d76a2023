#!lua flags=allow-oom
-- The general path, step 3: completion and W in one step, after all appends. A skip is the operator's word: W passes
-- the record whatever its progress says, and progress of another digest under the same id stays as it is.
-- Returns a letter: D W is at or past the record; S stale owner; G gap, or never begun; M same id, other digest.
local owner, watermarks, progress = KEYS[1], KEYS[2], KEYS[3]
local slot     = ARGV[1]           -- field of owner and mboxw
local epoch    = ARGV[2]           -- 8 bytes
local expected = tonumber(ARGV[3]) -- W as the caller believes
local seq      = tonumber(ARGV[4]) -- mailbox_seq of this record
local id       = ARGV[5]           -- dispatch id
local digest   = ARGV[6]           -- 8 bytes
local outcome  = ARGV[7]           -- f final, s skipped
local life_ms  = ARGV[8]           -- of the DP hash
if (redis.call('HGET', owner, slot) or ''):sub(1, 8) ~= epoch then return 'S' end
local state = redis.call('HGET', watermarks, slot)
if not state then return 'G' end
local w, base = struct.unpack('>I8I8', state)
if seq <= w then return 'D' end
if w ~= expected or seq ~= math.max(w + 1, base) then return 'G' end
local known = redis.call('HGET', progress, id)
if outcome == 'f' then
  if not known then return 'G' end
  if known:sub(1, 8) ~= digest then return 'M' end
end
local day = known and known:sub(10, 13) or state:sub(17, 20)
if not known or (known:sub(9, 9) == 'o' and known:sub(1, 8) == digest) then
  redis.call('HSET', progress, id, digest .. outcome .. day)
  redis.call('PEXPIRE', progress, life_ms)
end
redis.call('HSET', watermarks, slot, struct.pack('>I8', seq) .. state:sub(9, 36) .. id)
return 'D'
