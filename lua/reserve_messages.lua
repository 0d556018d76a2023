#!lua
-- Gives each message of a run its sequence, or says what is known about it. Decides all items, then writes.
-- Answer per item: sequence (new); 'C' reserved_at sequence (committed); 'R' reserved_at sequence ':' record
-- (recorded); -1 conflict, -2 stale owner, -3 clock, -4 conversation exhausted,
-- -6 the sender is not in the group, -7 its members have changed.
-- KEYS: owner, msgpending, conv of each conversation, msgrecord of each, cmidown of each item (its
--       pending field too), grp and grpmember of each group, collect sets; ARGV: the five below; slots; their
--       epochs (8 bytes); head of each item = slot u8 | conversation u8 | collect set u8, 0 none | identity 36
--       | reserved_at u64 | expires_at, in a group | version u64 behind it; record of each; where there are groups:
--       their conversations, u8 each
local items, convs, slots = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local skew_ms, seq_max    = tonumber(ARGV[4]), tonumber(ARGV[5])
local head_at, record_at           = 5 + 2 * slots, 5 + 2 * slots + items
local of_groups, groups            = ARGV[record_at + items + 1] or '', {}
local hot_at, key_at, group_at     = 2 + convs, 2 + 2 * convs, 2 + 2 * convs + items
local collect_at                   = group_at + 2 * #of_groups
local call, sub, byte, format, unpack_u64 = redis.call, string.sub, string.byte, string.format, struct.unpack
local function refusal(group, head, field) -- of a new message, by the members of this moment
  local row = call('HGET', group.members, sub(field, 36, 51))
  if not row or byte(row) ~= 1 then return -6 end
  return unpack_u64('>I8', head, #head - 7) ~= group.version and -7
end

local stale = call('HMGET', KEYS[1], unpack(ARGV, 6, 5 + slots))
for s = 1, slots do stale[s] = not stale[s] or sub(stale[s], 1, 8) ~= ARGV[5 + slots + s] end
local recorded = call('HMGET', KEYS[2], unpack(KEYS, key_at + 1, key_at + items))
local committed = call('MGET', unpack(KEYS, key_at + 1, key_at + items))
local found = call('EXISTS', unpack(KEYS, key_at + 1, key_at + items)) -- MGET shows a wrong type as absent
for i = collect_at + 1, #KEYS do call('ZCARD', KEYS[i]) end
for g = 1, #of_groups do
  local version = tonumber(call('HGET', KEYS[group_at + 2 * g - 1], 'version') or 0)
  groups[byte(of_groups, g)] = { version = version, members = KEYS[group_at + 2 * g] }
end
local now = call('TIME')
now = now[1] * 1000 + now[2] / 1000
local answers, last, first, values, fields, news, due = {}, {}, {}, {}, {}, {}, {}
for i = 1, items do
  local head, field = ARGV[head_at + i], KEYS[key_at + i]
  local slot, conv, collect = byte(head, 1, 3)
  local twin = first[field] -- an earlier item of this run with the same key
  local value = committed[i] or recorded[i] or values[twin]
  if committed[i] then found = found - 1 end
  if stale[slot] then
    answers[i] = -2
  elseif value and sub(value, 1, 36) ~= sub(head, 4, 39) then
    answers[i] = -1
  elseif committed[i] then
    answers[i] = 'C' .. sub(value, 37, -9)
  elseif value then
    local record = twin and ARGV[record_at + twin] or call('HGET', KEYS[hot_at + conv], sub(value, 45))
    answers[i] = 'R' .. sub(value, 37) .. ':' .. assert(record, 'a recorded message has no record')
  elseif groups[conv] and refusal(groups[conv], head, field) then
    answers[i] = refusal(groups[conv], head, field)
  elseif math.abs(unpack_u64('>I8', head, 40) - now) > skew_ms then
    answers[i] = -3
  else
    local seq = (last[conv] or tonumber(call('HGET', KEYS[2 + conv], 'n') or 0)) + 1
    local text, count = format('%d', seq), 2 * #news
    assert(last[conv] or call('HEXISTS', KEYS[hot_at + conv], text) == 0, 'a record above the last sequence')
    answers[i] = -4
    if seq <= seq_max then
      answers[i], last[conv], first[field], values[i] = seq, seq, i, sub(head, 4, 47) .. text
      fields[count + 1], fields[count + 2], news[count / 2 + 1] = field, values[i], i
      if collect > 0 then
        local expires = sub(head, 48, groups[conv] and -9)
        due[#due + 1] = { KEYS[collect_at + collect], expires, sub(field, 16, 35) .. text }
      end
    end
  end
end
assert(found == 0, 'wrong type under an idempotency key')
if #news > 0 then call('HSET', KEYS[2], unpack(fields)) end
for at, i in ipairs(news) do
  local conv, text = byte(ARGV[head_at + i], 2), sub(fields[2 * at], 45)
  call('HSET', KEYS[hot_at + conv], text, ARGV[record_at + i])
  if last[conv] == answers[i] then call('HSET', KEYS[2 + conv], 'n', text) end
end
for _, entry in ipairs(due) do call('ZADD', unpack(entry)) end
return answers
