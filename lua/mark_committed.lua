#!lua flags=allow-oom
-- Moves a run of RECORDED messages to COMMITTED: one stamp of TIME, idempotency window, head, read marks, time index.
-- The first stamp wins; a repeat only goes on draining msgahead (256 a call). Returns committed_at when all moved and
-- nothing is left to drain, else {committed_at, 1 = drain again, code of each item}: 0 moved, > 0 the stamp it has
-- already, -1 not pending, -2 stale owner.
-- KEYS: owner, msgpending, logseen, msghistory of 3 hours, conv of each conversation, msgahead of each, cmidown of items
--       (the pending fields too); ARGV: the seven below; slot numbers; their epochs (8 bytes); head of each item = slot
--       u8 | conversation u8 | bucket u8 | read mark field, empty for a control message; pending value of each item
local items, convs, slots         = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local window_ms, hour             = tonumber(ARGV[4]), tonumber(ARGV[5]) -- hour: that of KEYS[4]
local partition, offset           = ARGV[6], tonumber(ARGV[7])           -- Outbox; -1: the log did not say
local head_at, value_at           = 7 + 2 * slots, 7 + 2 * slots + items
local call, sub, byte, texts      = redis.call, string.sub, string.byte, {} -- texts: sequences as they came
local function text(n) return texts[n] or string.format('%d', n) end
local stale = call('HMGET', KEYS[1], unpack(ARGV, 8, 7 + slots))
for s = 1, slots do stale[s] = not stale[s] or sub(stale[s], 1, 8) ~= ARGV[7 + slots + s] end
local pending = call('HMGET', KEYS[2], unpack(KEYS, 7 + 2 * convs, 6 + 2 * convs + items))
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stamp, index, expires = struct.pack('>I8', now), math.floor(now / 3600000) - hour, text(now + window_ms)
if index < 0 or index > 2 then return redis.error_reply('REFUSED the clocks differ by more than an hour') end
local seen = tonumber(call('HGET', KEYS[3], partition) or -1) + 0 * call('LLEN', KEYS[4 + index])
local codes, states, keys, moved, elements = { now, 0 }, {}, {}, {}, {}
for i = 1, items do
  local head, value, key = ARGV[head_at + i], ARGV[value_at + i], KEYS[6 + 2 * convs + i]
  local user, digits, slot, conv = sub(head, 4), sub(value, 45), byte(head, 1, 2)
  local state, kept = states[conv], moved[key] or pending[i] ~= value and call('GET', key) -- moved: earlier in this run
  codes[i + 2] = stale[slot] and -2 or (kept and sub(kept, 1, -9) or pending[i]) == value and 0 or -1
  if codes[i + 2] == 0 and not state then
    local got = call('HMGET', KEYS[6 + conv], 'h', 'a', user)
    state = { head = tonumber(got[1] or 0), late = {}, marks = { [user] = tonumber(got[3] or 0) } }
    states[conv], state.ahead = state, got[2] == '1' and call('ZCARD', KEYS[6 + convs + conv])
  end
  if codes[i + 2] == 0 and kept then
    codes[i + 2] = struct.unpack('>I8', sub(kept, -8))
  elseif codes[i + 2] == 0 then
    local seq = tonumber(digits)
    state.head = state.head + (seq == state.head + 1 and 1 or 0)
    if seq > state.head then state.ahead, state.late[seq] = call('ZCARD', KEYS[6 + convs + conv]), seq end
    state.marks[user] = math.max(seq, state.marks[user] or tonumber(call('HGET', KEYS[6 + conv], user) or 0))
    keys[#keys + 1], moved[key], texts[seq] = key, value .. stamp, digits
    elements[#elements + 1] = sub(head, 3, 3) .. sub(key, 16, 35) .. stamp .. digits
  end
end
assert(#keys == 0 or call('EXISTS', unpack(keys)) == 0, 'recorded and committed at once')
for _, key in ipairs(keys) do call('SET', key, moved[key], 'PXAT', expires) end
for conv, state in pairs(states) do
  local ahead, marks = KEYS[6 + convs + conv], {}
  for seq in pairs(state.late) do call('ZADD', ahead, text(seq), text(seq)) end
  for at, seq in ipairs(state.ahead and call('ZRANGE', ahead, 0, 255) or {}) do
    if seq == text(state.head + 1) then state.head, codes[2] = state.head + 1, math.max(codes[2], at == 256 and 1 or 0) end
  end
  if state.ahead then marks = { 'a', call('ZREMRANGEBYSCORE', ahead, '-inf', text(state.head)) and call('ZCARD', ahead) > 0 and '1' or '0' } end
  state.marks[''] = nil -- control messages raise none
  for user, seq in pairs(state.marks) do marks[#marks + 1], marks[#marks + 2] = user, text(seq) end
  call('HSET', KEYS[6 + conv], 'h', text(state.head), unpack(marks))
end
if #keys > 0 and call('RPUSH', KEYS[4 + index], unpack(elements)) then call('HDEL', KEYS[2], unpack(keys)) end
if #keys > 0 and offset > seen then call('HSET', KEYS[3], partition, ARGV[7]) end
return #keys == items and codes[2] == 0 and now or codes
