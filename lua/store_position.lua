#!lua flags=allow-oom
-- Raises stored positions of log partitions; never lowers one.
-- Returns the number of positions that rose. Safe to repeat; unfenced, because positions only rise.
local positions = KEYS[1]   -- hash: partition -> offset
                            -- ARGV: partition, offset, partition, offset ...
local partitions = {}
for i = 1, #ARGV, 2 do
  partitions[#partitions + 1] = ARGV[i]
end
local stored = redis.call('HMGET', positions, unpack(partitions))
local raised = {}
for i = 1, #partitions do
  -- What is no number counts as absent: it must not hold up the positions of the other partitions.
  local known = tonumber(stored[i] or nil)
  if not known or known < tonumber(ARGV[2 * i]) then
    raised[#raised + 1] = partitions[i]
    raised[#raised + 1] = ARGV[2 * i]
  end
end
if #raised > 0 then
  redis.call('HSET', positions, unpack(raised))
end
return #raised / 2
