#!lua flags=allow-oom
-- The general path, step 2: entries of one begun dispatch for some of its recipients, in any order.
-- Returns a letter: D the entries are there; d the dispatch was final before, nothing written; S stale owner; G not
-- begun, or begun under another day than the keys'; M same id with another digest.
-- KEYS: owner, DP hash, then the mailbox key of each recipient
local owner, progress = KEYS[1], KEYS[2]
local slot      = ARGV[1]  -- field of owner
local epoch     = ARGV[2]  -- 8 bytes
local seq       = ARGV[3]  -- mailbox_seq, decimal
local id        = ARGV[4]  -- dispatch id
local digest    = ARGV[5]  -- 8 bytes
local day       = ARGV[6]  -- the keys' day, u32 big-endian
local entry     = ARGV[7]
local expire_at = ARGV[8]  -- of the keys, ms since 1970
local marks     = ARGV[9]  -- one character per recipient, 1 = this key gets its expiry now
if (redis.call('HGET', owner, slot) or ''):sub(1, 8) ~= epoch then return 'S' end
local known = redis.call('HGET', progress, id)
if not known then return 'G' end
if known:sub(1, 8) ~= digest then return 'M' end
if known:sub(9, 9) ~= 'o' then return 'd' end
if known:sub(10, 13) ~= day then return 'G' end
for k = 3, #KEYS do redis.call('ZCARD', KEYS[k]) end  -- a wrong type must fail before a write
for k = 3, #KEYS do
  redis.call('ZADD', KEYS[k], seq, entry)
  if marks:byte(k - 2) == 49 then redis.call('PEXPIREAT', KEYS[k], expire_at) end
end
return 'D'
