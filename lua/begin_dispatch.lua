#!lua flags=allow-oom
-- The general path, step 1: fixes digest and day of one dispatch. Writes no entry and does not move W.
-- Returns {letter, day}: O go on with the appends under that day; D final already, or W is past it; S stale owner,
-- G gap, M same id with another digest; {T, TIME day, stored day}: the shard's day must turn first, nothing written.
local owner, watermarks, progress = KEYS[1], KEYS[2], KEYS[3]
local slot     = ARGV[1]           -- field of owner and mboxw
local epoch    = ARGV[2]           -- 8 bytes
local expected = tonumber(ARGV[3]) -- W as the caller believes
local seq      = tonumber(ARGV[4]) -- mailbox_seq of this record
local id       = ARGV[5]           -- dispatch id
local digest   = ARGV[6]           -- 8 bytes
local life_ms  = ARGV[7]           -- of the DP hash
if (redis.call('HGET', owner, slot) or ''):sub(1, 8) ~= epoch then return {'S', 0} end
local state = redis.call('HGET', watermarks, slot)
if not state then return {'G', 0} end
local w, base, day = struct.unpack('>I8I8I4', state)
if seq <= w then return {'D', day} end
if w ~= expected or seq ~= math.max(w + 1, base) then return {'G', day} end
local known = redis.call('HGET', progress, id)
if known then
  if known:sub(1, 8) ~= digest then return {'M', day} end
  return {known:sub(9, 9) == 'o' and 'O' or 'D', (struct.unpack('>I4', known, 10))}
end
local today = math.floor(redis.call('TIME')[1] / 86400)
if day < today then return {'T', today, day} end
redis.call('HSET', progress, id, digest .. 'o' .. struct.pack('>I4', day))
redis.call('PEXPIRE', progress, life_ms)
return {'O', day}
