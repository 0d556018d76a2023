#!lua flags=allow-oom
-- The fused path: entries, completion and W of consecutive dispatch records of many shards, in one step.
-- Returns a letter per record: D written, d done before, R repeat without an entry, P done but not seen today, S stale
-- owner, G gap, M mismatch, O open, B behind a refused one. Keys of a wrong day: no write, {TIME day, day per shard}.
-- KEYS: owner, mboxw, DP hash of the records' hour, then the mailbox key of each entry
-- ARGV: life of the DP hash, of a mailbox day, of an ephemeral one (ms); plan; slot per shard; ids, DP values, entries.
--       The plan packs numbers, because arguments are dear: shards u16, records u16; per shard epoch 8 B, expected W
--       u64, first mailbox_seq u64, day u32, records u16; per record recipients u8, ephemeral u8, keys to expire u16
local plan, call = ARGV[4], redis.call
local shards, records, at = struct.unpack('>HH', plan)
local ids_at, entry_at, record_at = 4 + shards, 4 + shards + 2 * records, at + 30 * shards
local owners, states = call('HMGET', KEYS[1], unpack(ARGV, 5, ids_at)), call('HMGET', KEYS[2], unpack(ARGV, 5, ids_at))
local known = call('HMGET', KEYS[3], unpack(ARGV, ids_at + 1, ids_at + records))
local today, r, key = math.floor(call('TIME')[1] / 86400), 0, 3
local days, answers, seen, entries, progress, moves, day_differs = {}, {}, {}, {}, {}, {}, false
for s = 1, shards do
  local state, refused, moved, w, base = states[s], nil, nil, nil, nil
  local epoch, expected, seq, day, count = struct.unpack('>c8I8I8I4H', plan, at + 30 * (s - 1))
  w, base, days[s] = struct.unpack('>I8I8I4', state or string.rep('\0', 20))
  local next_seq = state and w == expected and math.max(w + 1, base)
  if (owners[s] or ''):sub(1, 8) ~= epoch then refused = 'S'
  elseif state and (days[s] < today or days[s] ~= day) then day_differs = true end
  for _ = 1, count do
    r = r + 1
    local recipients, ephemeral, marks = struct.unpack('>BBH', plan, record_at + 4 * r - 4)
    local id, value, answer = ARGV[ids_at + r], ARGV[ids_at + records + r], nil
    local old = seen[id] or known[r]
    if refused then answer = refused
    elseif seq <= w then  -- it is done already
      local stands_at = call('ZSCORE', KEYS[key + 1], ARGV[entry_at + r])
      answer = not stands_at and 'P' or tonumber(stands_at) == seq and 'd' or 'R'
    elseif seq ~= next_seq then answer = 'G'
    elseif old and old:sub(1, 8) ~= value:sub(1, 8) then answer = 'M'
    elseif old and old:byte(9) == 111 then answer = 'O'
    else
      moved, next_seq, answer = id, seq + 1, 'R'
      if not old then  -- otherwise a duplicate dispatch at a later offset: only W moves
        progress[#progress + 1], progress[#progress + 2], seen[id], answer = id, value, value, 'D'
        for k = key + 1, key + recipients do call('ZCARD', KEYS[k]) end  -- a wrong type fails here, unwritten
        local expire_at = (day + 1) * 86400000 + ARGV[2 + ephemeral]
        entries[#entries + 1] = {key, recipients, seq, ARGV[entry_at + r], marks, expire_at}
      end
    end
    if not answer:find('[DdRP]') then refused = answer == 'S' and 'S' or 'B' end
    answers[r], key, seq = answer, key + recipients, seq + 1
  end
  if moved then moves[#moves + 1], moves[#moves + 2] = ARGV[4 + s], struct.pack('>I8', next_seq - 1)
      .. state:sub(9, 36) .. moved end
end
if day_differs then return {today, unpack(days)} end
for _, e in ipairs(entries) do
  local first, recipients, seq, entry, marks, expire_at = unpack(e)
  for n = 1, recipients do
    call('ZADD', KEYS[first + n], seq, entry)
    if marks % 2 ^ n >= 2 ^ (n - 1) then call('PEXPIREAT', KEYS[first + n], expire_at) end
  end
end
if progress[1] then call('HSET', KEYS[3], unpack(progress)); call('PEXPIRE', KEYS[3], ARGV[1]) end
if #moves > 0 then call('HSET', KEYS[2], unpack(moves)) end
return table.concat(answers)
