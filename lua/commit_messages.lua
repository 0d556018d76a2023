#!lua
-- Reserves, appends to the Outbox and commits a run in one step, where one server holds conversations and Outbox.
-- Decides all items, then writes; the stream comes first, because it is the one write that may be refused.
-- Answers {offset of the first new record, then per item}: sequence (new, now COMMITTED); 'C' reserved_at sequence; 'R'
-- reserved_at sequence ':' record; -1 conflict, -2 stale owner, -3 clock, -4 conversation exhausted; -5 go in two steps,
-- because an unfinished message lies before it or the Outbox contradicts its counter; -6 the sender is not in the group;
-- -7 its members have changed.
-- KEYS: owner, msgpending, logseen, log counters, Outbox stream, msghistory of 3 hours, conv and msgrecord of all
-- conversations, cmidown of all items (pending fields too), grp and grpmember of the groups, collect sets; ARGV: the eight
-- below; slots; epochs; heads as in reserve_messages.lua; Outbox frames (records.py); records; as there, the groups
local items, convs, slots, skew_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local seq_max, window, hour, partition = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
local head_at, frame_at, record_at = 8 + 2 * slots, 8 + 2 * slots + items, 8 + 2 * slots + 2 * items
local of_groups, groups            = ARGV[record_at + items + 1] or '', {}
local hot_at, key_at, group_at     = 8 + convs, 8 + 2 * convs, 8 + 2 * convs + items
local collect_at                   = group_at + 2 * #of_groups
local call, sub, byte, format, pack = redis.call, string.sub, string.byte, string.format, struct.pack
local function refusal(group, head, key) -- of a new message, by the members of this moment
  local row = call('HGET', group.members, sub(key, 36, 51))
  if not row or byte(row) ~= 1 then return -6 end
  return struct.unpack('>I8', head, #head - 7) ~= group.version and -7
end
-- read
local stale = call('HMGET', KEYS[1], unpack(ARGV, 9, 8 + slots))
for s = 1, slots do stale[s] = not stale[s] or sub(stale[s], 1, 8) ~= ARGV[8 + slots + s] end
local recorded = call('HLEN', KEYS[2]) > 0 and call('HMGET', KEYS[2], unpack(KEYS, key_at + 1, key_at + items)) or {}
local committed = call('MGET', unpack(KEYS, key_at + 1, key_at + items))
local found = call('EXISTS', unpack(KEYS, key_at + 1, key_at + items)) -- MGET shows a wrong type as absent
for i = collect_at + 1, #KEYS do call('ZCARD', KEYS[i]) end
for g = 1, #of_groups do
  local version = tonumber(call('HGET', KEYS[group_at + 2 * g - 1], 'version') or 0)
  groups[byte(of_groups, g)] = { version = version, members = KEYS[group_at + 2 * g] }
end
local now = call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local stamp, expires, index = pack('>I8', now), format('%d', now + window), math.floor(now / 3600000) - hour
if index < 0 or index > 2 then return redis.error_reply('REFUSED the clocks differ by more than an hour') end
local seen = tonumber(call('HGET', KEYS[3], partition) or -1) + 0 * call('LLEN', KEYS[6 + index])
-- What is wrong with the log alone is for append_log.lua to judge: no error here, the run goes in two steps.
local counter, length = redis.pcall('HGET', KEYS[4], partition), redis.pcall('XLEN', KEYS[5])
local offset = type(counter) ~= 'table' and type(length) == 'number' and tonumber(counter or 0) or -1
if offset < 0 or (length > 0) ~= (offset > 0) or
  #call('XRANGE', KEYS[5], format('%.0f-1', offset), '+', 'COUNT', 1) > 0 then offset = -1 end
-- decide
local answers, last, first, values, news, due, packed, fields = {}, {}, {}, {}, {}, {}, {}, {}
for i = 1, items do
  local head, key, record = ARGV[head_at + i], KEYS[key_at + i], ARGV[record_at + i]
  local slot, conv, collect = byte(head, 1, 3)
  local value = committed[i] or recorded[i] or values[first[key]] -- the last: an earlier item of this run
  found = found - (committed[i] and 1 or 0)
  if stale[slot] or value and sub(value, 1, 36) ~= sub(head, 4, 39) then
    answers[i] = stale[slot] and -2 or -1
  elseif committed[i] then
    answers[i] = 'C' .. sub(value, 37, -9)
  elseif recorded[i] then
    local stored = assert(call('HGET', KEYS[hot_at + conv], sub(value, 45)), 'a recorded message has no record')
    answers[i] = 'R' .. sub(value, 37) .. ':' .. stored
  elseif value then
    answers[i] = 'C' .. sub(value, 37)
  elseif groups[conv] and refusal(groups[conv], head, key) then
    answers[i] = refusal(groups[conv], head, key)
  elseif math.abs(struct.unpack('>I8', head, 40) - now) > skew_ms then
    answers[i] = -3
  else
    if not last[conv] then
      local got = call('HMGET', KEYS[8 + conv], 'n', 'h')
      local n, h = tonumber(got[1] or 0), tonumber(got[2] or 0)
      assert(call('HEXISTS', KEYS[hot_at + conv], format('%d', n + 1)) == 0, 'a record above the last sequence')
      last[conv] = offset >= 0 and n == h and n or -1
    end
    local seq, frame, at = last[conv] + 1, ARGV[frame_at + i], #news + 1
    answers[i] = seq == 0 and -5 or -4
    if seq > 0 and seq <= seq_max then
      local text, entry = format('%d', seq), '\146' .. cmsgpack.pack(seq) .. record
      answers[i], last[conv], first[key], values[i], news[at] = seq, seq, i, sub(head, 4, 47) .. text, i
      packed[at] = pack('>I4', #frame + 8 + #entry) .. sub(frame, 1, 8) .. pack('>I8', seq) .. sub(frame, 9) .. entry
      if collect > 0 then
        local until_ms = sub(head, 48, groups[conv] and -9)
        due[#due + 1] = { KEYS[collect_at + collect], until_ms, sub(key, 16, 35) .. text }
      end
    end
  end
end
assert(found == 0, 'wrong type under an idempotency key')
-- write
local id = format('%.0f-0', offset + #news)
if #news > 0 and redis.pcall('XADD', KEYS[5], id, 'n', #news, 'r', table.concat(packed)) ~= id then
  for i = 1, items do answers[i] = first[KEYS[key_at + i]] and -5 or answers[i] end -- and what took them for written
  news, due = {}, {}
end
local elements = {}
for at, i in ipairs(news) do
  local conv, key, text = byte(ARGV[head_at + i], 2), KEYS[key_at + i], sub(values[i], 45)
  call('HSET', KEYS[hot_at + conv], text, ARGV[record_at + i])
  call('SET', key, values[i] .. stamp, 'PXAT', expires)
  fields[conv] = fields[conv] or {}
  table.insert(fields[conv], 'r' .. sub(key, 36, 51))
  table.insert(fields[conv], text)
  elements[at] = sub(ARGV[frame_at + i], 4, 4) .. sub(key, 16, 35) .. stamp .. text
end
for conv, marks in pairs(fields) do
  local head = format('%d', last[conv])
  call('HSET', KEYS[8 + conv], 'n', head, 'h', head, unpack(marks))
end
for _, entry in ipairs(due) do call('ZADD', unpack(entry)) end
if #news > 0 then
  call('HSET', KEYS[4], partition, format('%.0f', offset + #news))
  call('RPUSH', KEYS[6 + index], unpack(elements))
  call('HSET', KEYS[3], partition, format('%.0f', math.max(seen, offset + #news - 1)))
end
table.insert(answers, 1, offset)
return answers
