#!lua flags=allow-oom
-- Appends records to partitions of a log: one stream entry per partition and call, offsets dense per partition.
-- An entry's id is the offset behind its last record, so the stream's own last id says the next offset; a counter
-- says the same for a fifth of the price. The two are held against each other: a counter without stream, or behind
-- its stream, refuses that partition; a lost counter is read back from the stream.
-- Returns per partition the offset of the first record, or -1: refused, nothing was written there.
-- KEYS: counters, then the stream of each partition
-- ARGV: the partition of each stream, then per stream: number of records, packed records
local streams, answers, counters = #KEYS - 1, {}, {}
local nexts = redis.call('HMGET', KEYS[1], unpack(ARGV, 1, streams))
for s = 1, streams do
  local entries = redis.call('XLEN', KEYS[s + 1])  -- a wrong type must fail before a write
  if entries == 0 then nexts[s] = nexts[s] and -1 or 0
  elseif not nexts[s] then
    local info = redis.call('XINFO', 'STREAM', KEYS[s + 1])
    for n = 1, #info, 2 do
      if info[n] == 'last-generated-id' then nexts[s] = info[n + 1]:match('^%d+') end
    end
  end
end
for s = 1, streams do
  local first, count = tonumber(nexts[s]), ARGV[streams + 2 * s - 1]
  local after = first + count
  answers[s] = -1
  if first >= 0 and #redis.call('XRANGE', KEYS[s + 1], string.format('%.0f-1', first), '+', 'COUNT', 1) == 0 then
    local id = string.format('%.0f-0', after)
    local added = redis.pcall('XADD', KEYS[s + 1], id, 'n', count, 'r', ARGV[streams + 2 * s])
    if added == id then
      counters[#counters + 1], counters[#counters + 2] = ARGV[s], string.format('%.0f', after)
      answers[s] = first
    end
  end
end
if #counters > 0 then redis.call('HSET', KEYS[1], unpack(counters)) end
return answers
