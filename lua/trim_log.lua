#!lua flags=allow-oom
-- Drops whole stream entries below a bound; the entry that holds the record at the bound stays. The bound is held
-- against every consumer whose state lives on this instance; one without state has finished nothing, so nothing goes.
-- Returns per stream the number of entries dropped.
-- KEYS: position hashes (partition → last finished offset), W hashes (partition → packed W), then the streams
-- ARGV: number of position hashes, number of W hashes, then per stream: partition, bound
local positions, watermarks = tonumber(ARGV[1]), tonumber(ARGV[2])
local consumers = positions + watermarks
local bounds, dropped = {}, {}
for s = 1, #KEYS - consumers do
  local partition, bound = ARGV[2 * s + 1], tonumber(ARGV[2 * s + 2])
  for c = 1, consumers do
    local value, position = redis.call('HGET', KEYS[c], partition), 0
    if value and c <= positions then position = tonumber(value)
    elseif value then
      local w, base = struct.unpack('>I8I8', value)
      position = w - base
    end
    bound = math.min(bound, position)
  end
  local newest = redis.call('XREVRANGE', KEYS[consumers + s], '+', '-', 'COUNT', 1)[1]
  bounds[s] = newest and math.min(bound, tonumber(newest[1]:match('^%d+')) - 1) or 0  -- never the last entry
end
for s, bound in ipairs(bounds) do
  dropped[s] = 0
  -- an entry's id is the offset behind its last record: at or below the bound, all its records lie below it
  if bound > 0 then
    dropped[s] = redis.call('XTRIM', KEYS[consumers + s], 'MINID', '=', string.format('%.0f', bound + 1))
  end
end
return dropped
