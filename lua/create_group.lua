#!lua
-- Makes a group with its first members, all at joined_at 0: no control message says so.
-- Returns 1 made now, 0 made by an earlier call with the same digest, -1 the id holds other content, -2 stale owner.
local owners      = KEYS[1]  -- hash: slot -> owner value
local group       = KEYS[2]  -- hash: digest, group_id, name, owner, version, count, created_at
local members     = KEYS[3]  -- hash: user -> state u8 | joined_at u64 | left_at u64
local snapshots   = KEYS[4]  -- hash: version -> 64 x u64, the version of each shard's part; 'shard:version' -> users
local announced   = KEYS[5]  -- list: groups that are not in their members' lists yet
local slot, epoch = ARGV[1], ARGV[2]
local digest      = ARGV[3]  -- 32 bytes, over everything that the creator chose
local group_id, name, owner = ARGV[4], ARGV[5], ARGV[6]
local element     = ARGV[7]  -- what is pushed: tenant u32 | conversation 16 | version as text
local FIRST_USER  = 8        -- from here on: shard u8 | user 16, each user once
local STATE_MEMBER, SHARDS = 1, 64
local VERSION     = 1

local held = redis.call('HGET', owners, slot)
local known = redis.call('HGET', group, 'digest')
if not held or string.sub(held, 1, 8) ~= epoch then return -2 end
if known then return known == digest and 0 or -1 end
assert(redis.call('EXISTS', group, members, snapshots) == 0, 'parts of a group that does not exist')
redis.call('LLEN', announced)
local time = redis.call('TIME')

local row, rows, parts = struct.pack('>BI8I8', STATE_MEMBER, 0, 0), {}, {}
for i = FIRST_USER, #ARGV do
  local shard, user = string.byte(ARGV[i]), string.sub(ARGV[i], 2)
  parts[shard] = parts[shard] or {}
  table.insert(parts[shard], user)
  rows[#rows + 1], rows[#rows + 2] = user, row
end
local index, fields = {}, {}
for shard = 0, SHARDS - 1 do
  local part = parts[shard]
  index[shard + 1] = struct.pack('>I8', part and VERSION or 0)
  if part then
    fields[#fields + 1], fields[#fields + 2] = shard .. ':' .. VERSION, table.concat(part)
  end
end
redis.call('HSET', group, 'digest', digest, 'group_id', group_id, 'name', name, 'owner', owner, 'version', VERSION,
  'count', #rows / 2, 'created_at', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
redis.call('HSET', members, unpack(rows))
redis.call('HSET', snapshots, VERSION, table.concat(index), unpack(fields))
redis.call('RPUSH', announced, element)
return 1
