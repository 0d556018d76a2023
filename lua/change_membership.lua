#!lua
-- Changes the members of a group and records the control message that says so, in one step; decides all, then writes.
-- Returns {code, sequence, count, version, and for codes 1 and 2: pending field, pending value, record}.
-- Codes: 1 done now, its event is RECORDED; 2 an event is RECORDED and must be finished first, then ask again; 0 in
-- effect; -1 conflict, -2 stale owner, -3 clock, -4 conversation exhausted, -5 an older event is not finished,
-- -6 no such group, or who leaves was never in it, -7 the plan is not made of these members.
local owners, pending, conversation, records, skips     = unpack(KEYS, 1, 5)
local group, members, snapshots, garbage                = unpack(KEYS, 6, 9)
local slot, epoch, skew_ms, seq_max, op, planned, actor = unpack(ARGV, 1, 7) -- actor: '' where an operator acts
local owner_after, asked, asked_life_ms, snapshot_life_ms, head, record = unpack(ARGV, 8, 13)
local USERS      = 13                               -- behind it: shard u8 | user 16 of each user whom the plan changes
local request    = asked ~= '' and KEYS[10] or nil  -- hash: the result of an operator's request; asked: its digest
local event      = KEYS[request and 11 or 10]       -- cmidown of the event, its pending field too; nil: nothing to do
local MEMBER, JOIN, LEAVE = 1, '1', '2'
local call, sub, byte, format, pack, unpack_u64 =
  redis.call, string.sub, string.byte, string.format, struct.pack, struct.unpack

local function remember(seq, count, version)
  if request then
    call('HSET', request, 'digest', asked, 'seq', seq, 'count', count, 'version', version, 'event', event or '')
    call('PEXPIRE', request, asked_life_ms)
  end
end
local function recorded(field, value, count, version)
  local seq = sub(value, 45)
  local stored = assert(call('HGET', records, seq), 'a recorded event has no record')
  return { 2, seq, count, version, field, value, stored }
end

local held = call('HGET', owners, slot)
if not held or sub(held, 1, 8) ~= epoch then return { -2 } end
local known = request and call('HMGET', request, 'digest', 'seq', 'count', 'version', 'event') or {}
if known[1] then
  if known[1] ~= asked then return { -1 } end
  local value = call('HGET', pending, known[5])
  return value and recorded(known[5], value, known[3], known[4]) or { 0, known[2], known[3], known[4] }
end
local heads = call('HMGET', group, 'version', 'count', 'event', 'event_seq')
local version, count, last_event, last_seq = unpack(heads, 1, 4)
if not version then return { -6 } end
local committed = event and call('GET', event)
local fact = committed or event and call('HGET', pending, event)
if fact then
  if sub(fact, 1, 36) ~= sub(head, 1, 36) then return { -1 } end
  if not committed then return recorded(event, fact, count, version) end
  remember(sub(fact, 45, -9), count, version)
  return { 0, sub(fact, 45, -9), count, version }
end
local counters = call('HMGET', conversation, 'n', 'h')
if not event then
  if op == LEAVE and not call('HGET', members, actor) then return { -6 } end
  if version ~= planned then return { -7 } end
  if tonumber(counters[2] or 0) < tonumber(last_seq or 0) then
    local value = call('HGET', pending, last_event)
    return value and recorded(last_event, value, count, version) or { -5 }
  end
  remember('0', count, version)
  return { 0, '0', count, version }
end

local time = call('TIME')
local seq, users, touched, changed = tonumber(counters[1] or 0) + 1, {}, {}, {}
if version ~= planned or #ARGV == USERS then return { -7 } end
if math.abs(unpack_u64('>I8', head, 37) - time[1] * 1000 - time[2] / 1000) > tonumber(skew_ms) then return { -3 } end
if seq > tonumber(seq_max) then return { -4 } end
for i = USERS + 1, #ARGV do
  local shard, user = byte(ARGV[i]), sub(ARGV[i], 2)
  users[i - USERS], changed[user], touched[shard] = user, true, touched[shard] or {}
  table.insert(touched[shard], user)
end
local rows, text, after = call('HMGET', members, unpack(users)), format('%d', seq), format('%d', version + 1)
local count_after = count + (op == JOIN and 1 or -1) * #users
local heir, fields = call('HGET', members, owner_after), {}
local heir_stays = heir and byte(heir) == MEMBER and not changed[owner_after]
local fits = heir_stays or count_after == 0 and owner_after == ''
for i, user in ipairs(users) do
  local is_member = rows[i] and byte(rows[i]) == MEMBER or false
  fits = fits and is_member == (op ~= JOIN)
  local left = op ~= JOIN and rows[i] and pack('>B', op) .. sub(rows[i], 2, 9) .. pack('>I8', seq)
  fields[2 * i - 1], fields[2 * i] = user, left or pack('>BI8I8', MEMBER, seq - 1, 0)
end
if not fits then return { -7 } end
local index = assert(call('HGET', snapshots, version), 'the snapshot of the version is missing')
local entries, parts, due = {}, {}, {}
local expires = format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + snapshot_life_ms)
local function supersede(field) due[#due + 1], due[#due + 2] = expires, sub(conversation, 13) .. field end
for at = 1, 512, 8 do entries[#entries + 1] = sub(index, at, at + 7) end
for shard, moving in pairs(touched) do
  local from, part, kept = unpack_u64('>I8', entries[shard + 1]), '', {}
  if from > 0 then
    local field = format('%d:%d', shard, from)
    part = assert(call('HGET', snapshots, field), 'a part of the snapshot is missing')
    supersede(field)
  end
  for at = 1, #part, 16 do
    local user = sub(part, at, at + 15)
    if not changed[user] then kept[#kept + 1] = user end
  end
  assert(#part / 16 - #kept == (op == JOIN and 0 or #moving), 'the snapshot contradicts the members')
  part = table.concat(kept) .. (op == JOIN and table.concat(moving) or '')
  entries[shard + 1] = pack('>I8', part == '' and 0 or after)
  if part ~= '' then parts[#parts + 1], parts[#parts + 2] = shard .. ':' .. after, part end
end
supersede(version)
assert(call('HEXISTS', records, text) == 0, 'a record above the last sequence')
call('ZCARD', skips)
call('ZCARD', garbage)

call('HSET', conversation, 'n', text)
call('HSET', records, text, record)
call('HSET', pending, event, head .. text)
call('ZADD', skips, text, text)
call('HSET', members, unpack(fields))
call('HSET', snapshots, after, table.concat(entries), unpack(parts))
call('ZADD', garbage, unpack(due))
call('HSET', group, 'version', after, 'count', count_after, 'owner', owner_after, 'event', event, 'event_seq', text)
remember(text, count_after, after)
return { 1, text, count_after, after, event, head .. text, record }
