#!lua flags=allow-oom,no-writes
-- One page of a user's entries in (after, W], in mailbox_seq order, over the days that are kept; a day's ephemeral
-- entries are merged with its others. Reads in steps, so that a page of large entries never loads much more than it
-- returns. Returns {covered_through, more, rebuild, newest, kinds, seq, entry, seq, entry ...}; kinds has a character
-- per entry, e = ephemeral. When the newest day is not the one the keys were made for: {day}.
-- KEYS: mboxw, day hash, then of each kept day from the oldest on the mbox and the mboxe key
local slot, day = ARGV[1], tonumber(ARGV[2])                          -- day of the last two keys
local after, entries_max, bytes_max = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local held_through, held_count = tonumber(ARGV[6]), tonumber(ARGV[7]) -- 0 = nothing held
local keep, step = (#KEYS - 2) / 2 - 1, 16                            -- days before the current one; entries a read
local state = redis.call('HGET', KEYS[1], slot)
local w, _, stored = struct.unpack('>I8I8I4', state or string.rep('\0', 20))
local current = math.max(stored, math.floor(redis.call('TIME')[1] / 86400))
if current ~= day then return {current} end
local floor, noted, last_of = 0, redis.call('HGETALL', KEYS[2]), {}
for n = 1, #noted, 2 do
  last_of[tonumber(noted[n])] = tonumber(noted[n + 1])
  if day - tonumber(noted[n]) > keep then floor = math.max(floor, tonumber(noted[n + 1])) end
end
if stored > 0 and day - stored > keep then floor = w end
local function text(number) return string.format('%.0f', number) end
local newest, answer, kinds, bytes = 0, {}, {}, 0
for k = #KEYS, 3, -1 do
  local found = redis.call('ZREVRANGEBYSCORE', KEYS[k], text(w), '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
  newest = math.max(newest, tonumber(found[2] or 0))
  if newest > 0 and k % 2 == 1 then break end
end
local function reply(covered, more, rebuild)
  return {text(covered), more, rebuild, text(newest), table.concat(kinds), unpack(answer)}
end
if after < floor or after > w then return reply(w, 0, 1) end
if held_through > after and held_through <= w then
  local count = 0
  for k = 3, #KEYS do count = count + redis.call('ZCOUNT', KEYS[k], '(' .. text(after), text(held_through)) end
  if count == held_count then return reply(held_through, newest > held_through and 1 or 0, 0) end
end
local function read(key, from)
  return redis.call('ZRANGEBYSCORE', key, '(' .. text(from), text(w), 'WITHSCORES', 'LIMIT', 0, step)
end
local position = after
for k = 3, #KEYS - 1, 2 do
  local last = last_of[day - keep + (k - 3) / 2]
  local again = not last or last > after
  while again do
    local plain, brief, p, b = read(KEYS[k], position), read(KEYS[k + 1], position), 2, 2
    again = false
    while not again and (plain[p] or brief[b]) do
      local from_plain = plain[p] and (not brief[b] or tonumber(plain[p]) < tonumber(brief[b]))
      local list, at = from_plain and plain or brief, from_plain and p or b
      local full = #kinds == entries_max or (#kinds > 0 and bytes + #list[at - 1] > bytes_max)
      if full then return reply(position, 1, 0) end
      position, bytes = tonumber(list[at]), bytes + #list[at - 1]
      kinds[#kinds + 1], answer[#answer + 1], answer[#answer + 2] = from_plain and 'm' or 'e', list[at], list[at - 1]
      if from_plain then p = p + 2 else b = b + 2 end
      again = (not plain[p] and #plain == 2 * step) or (not brief[b] and #brief == 2 * step)
    end
  end
end
return reply(w, 0, 0)
