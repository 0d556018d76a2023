#!lua flags=no-writes
-- One step of a scan over what is in flight: RECORDED messages of some buckets that are old enough.
-- Returns {cursor, field, value, field, value ...}; cursor '0' ends a round. An entry that stays pending for a
-- whole round is returned at least once in it. Records are read apart: their keys are known only after this.
local pending  = KEYS[1]             -- hash: pending field -> pending value
local cursor   = ARGV[1]             -- '0' at first, then what the last step returned
local count    = ARGV[2]             -- entries looked at per step, about
local older_ms = tonumber(ARGV[3])   -- age by TIME above which an entry is returned
local buckets  = {}                  -- ARGV[4]: one byte per bucket
for i = 1, #ARGV[4] do
  buckets[string.byte(ARGV[4], i)] = true
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local step = redis.call('HSCAN', pending, cursor, 'COUNT', count)
local answer = { step[1] }
for i = 1, #step[2], 2 do
  local field, value = step[2][i], step[2][i + 1]
  -- What is too short to be one of ours is returned too: it must not hide the others behind an error.
  if buckets[tonumber(string.sub(field, 11, 13))]
      and (#value < 45 or now - struct.unpack('>I8', value, 37) > older_ms) then
    answer[#answer + 1] = field
    answer[#answer + 1] = value
  end
end
return answer
