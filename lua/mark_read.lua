#!lua flags=allow-oom
-- Raises read marks, never lowers one; clamps to the last allocated sequence, and to `upper`. Safe to repeat.
-- Returns two numbers per item: the mark after the call and the unread count, or -2, 0 for a stale owner.
-- The unread count ends at the visible head, or at `upper`, and leaves out what never counts as unread.
local owner = KEYS[1]            -- hash: slot -> owner value
                                 -- KEYS: conversation and skip set of item 1, of item 2 ...
local items = tonumber(ARGV[1])  -- ARGV: slot, epoch (8 bytes), read mark field, sequence, upper of item 1, ...
                                 -- upper: the last sequence that the user may see, '' where that is the head

local answer, writes = {}, {}
local raised = {}                -- marks that an earlier item of this run raised
for i = 1, items do
  local conversation, skips = KEYS[2 * i], KEYS[2 * i + 1]
  local slot, epoch, field, wanted, upper = unpack(ARGV, 5 * i - 3, 5 * i + 1)
  local value = redis.call('HGET', owner, slot)
  if not value or string.sub(value, 1, 8) ~= epoch then
    answer[2 * i - 1], answer[2 * i] = -2, 0
  else
    local stored = redis.call('HMGET', conversation, 'n', 'h', field)
    local mark = math.max(tonumber(stored[3] or 0), raised[conversation .. field] or 0)
    local last, head = tonumber(stored[1] or 0), tonumber(stored[2] or 0)
    if upper ~= '' then
      last, head = math.min(last, tonumber(upper)), math.min(head, tonumber(upper))
    end
    local clamped = math.min(tonumber(wanted), last)
    if clamped > mark then
      mark = clamped
      raised[conversation .. field] = mark
      writes[#writes + 1] = { conversation, field, string.format('%d', mark) }
    end
    local skipped = redis.call('ZCOUNT', skips, string.format('(%d', mark), string.format('%d', head))
    answer[2 * i - 1], answer[2 * i] = mark, math.max(0, head - mark - skipped)
  end
end
for _, write in ipairs(writes) do
  redis.call('HSET', unpack(write))
end
return answer
