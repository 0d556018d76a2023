#!lua flags=allow-oom
-- Moves a run of RECORDED messages to COMMITTED: one stamp of TIME, idempotency window, head, read marks, time index.
-- The first stamp wins; a repeat only goes on draining msgahead (256 a call). Returns committed_at when all moved and all
-- is drained, else {committed_at, 1 = drain again, codes}: 0 moved, > 0 its older stamp, -1 not pending, -2 stale owner.
-- KEYS: owner, msgpending, logseen, msghistory of 3 hours, conv and msgahead of all conversations, cmidown of all items
-- (pending fields too). ARGV: the three; window, hour of KEYS[4], Outbox partition, offset (-1: unknown); slots; epochs;
-- heads: slot u8 | conversation u8 | mark u8 | bucket u8 | mark field, empty for a control message; pending values
local items, convs, slots    = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now, hour, offset      = redis.call('TIME'), tonumber(ARGV[5]), tonumber(ARGV[7])
local head_at, value_at      = 7 + 2 * slots, 7 + 2 * slots + items
local call, sub, byte, texts = redis.call, string.sub, string.byte, {} -- texts: sequences as they came
local function text(n) return texts[n] or string.format('%d', n) end
local stale = call('HMGET', KEYS[1], unpack(ARGV, 8, 7 + slots))
for s = 1, slots do stale[s] = not stale[s] or sub(stale[s], 1, 8) ~= ARGV[7 + slots + s] end
local pending = call('HMGET', KEYS[2], unpack(KEYS, 7 + 2 * convs, 6 + 2 * convs + items))
now = now[1] * 1000 + math.floor(now[2] / 1000)
local stamp, index, expires = struct.pack('>I8', now), math.floor(now / 3600000) - hour, text(now + tonumber(ARGV[4]))
if index < 0 or index > 2 then return redis.error_reply('REFUSED the clocks differ by more than an hour') end
local seen = tonumber(call('HGET', KEYS[3], ARGV[6]) or -1) + 0 * call('LLEN', KEYS[4 + index])
local codes, keys, moved, elements, heads, aheads, marks, users = { now, 0 }, {}, {}, {}, {}, {}, {}, {}
for i = 1, items do
  local head, value, key = ARGV[head_at + i], ARGV[value_at + i], KEYS[6 + 2 * convs + i]
  local slot, conv, mark = byte(head, 1, 3)
  local kept = moved[key] or pending[i] ~= value and call('GET', key) -- moved: earlier in this run
  local code = stale[slot] and -2 or (kept and sub(kept, 1, -9) or pending[i]) == value and 0 or -1
  if code == 0 and not marks[mark] then
    local got = call('HMGET', KEYS[6 + conv], 'h', 'a', sub(head, 5))
    heads[conv], marks[mark] = heads[conv] or tonumber(got[1] or 0), tonumber(got[3] or 0)
    aheads[conv] = aheads[conv] or got[2] == '1' and call('ZCARD', KEYS[6 + convs + conv]) and {} or nil
  end
  if kept then
    code = code == 0 and struct.unpack('>I8', sub(kept, -8)) or code
  elseif code == 0 then
    local digits, seq, count = sub(value, 45), tonumber(sub(value, 45)), #keys + 1
    local is_late = seq > heads[conv] + 1
    heads[conv], marks[mark] = is_late and heads[conv] or math.max(seq, heads[conv]), math.max(seq, marks[mark])
    if is_late and call('ZCARD', KEYS[6 + convs + conv]) then aheads[conv] = { digits, unpack(aheads[conv] or {}) } end
    keys[count], moved[key], texts[seq], users[mark] = key, value .. stamp, digits, head
    elements[count] = sub(head, 4, 4) .. sub(key, 16, 35) .. stamp .. digits
  end
  codes[i + 2] = code
end
assert(#keys == 0 or call('EXISTS', unpack(keys)) == 0, 'recorded and committed at once')
for _, key in ipairs(keys) do call('SET', key, moved[key], 'PXAT', expires) end
for conv, late in pairs(aheads) do
  local ahead = KEYS[6 + convs + conv]
  for _, seq in ipairs(late) do call('ZADD', ahead, seq, seq) end
  for at, seq in ipairs(call('ZRANGE', ahead, 0, 255)) do
    if seq == text(heads[conv] + 1) then heads[conv], codes[2] = heads[conv] + 1, math.max(codes[2], at == 256 and 1 or 0) end
  end
  call('ZREMRANGEBYSCORE', ahead, '-inf', text(heads[conv]))
  call('HSET', KEYS[6 + conv], 'h', text(heads[conv]), 'a', call('ZCARD', ahead) > 0 and '1' or '0')
end
for mark, head in pairs(users) do
  local conv, user = byte(head, 2), sub(head, 5)
  call('HSET', KEYS[6 + conv], 'h', text(heads[conv]), user == '' and 'h' or user, text(user == '' and heads[conv] or marks[mark]))
end
if #keys > 0 then call('RPUSH', KEYS[4 + index], unpack(elements)); call('HDEL', KEYS[2], unpack(keys)) end
if #keys > 0 and offset > seen then call('HSET', KEYS[3], ARGV[6], ARGV[7]) end
return #keys == items and codes[2] == 0 and now or codes
