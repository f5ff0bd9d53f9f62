-- The records of a job's queue: an episode, a group, a holder, an awaited reward. Each carries the number of its schema and is read whatever
-- release wrote it. An episode's record that cannot be read costs that episode alone; any other one that cannot be read is
-- DAMAGED, and the trainer empties the queue and dispatches again.

-- 1 (no number) is everything before 0.2.0; its oldest episodes lack some of the counters. 3 adds the offers and loans of
-- episodes that agents fetch, episodes that wait for their reward, and the parts of worlds; all else is as in 2.
local SCHEMA = 3
local COUNTERS_OF_OLD = {"reserve", "bytes", "failures", "deaths", "furthest"}
local NUMBERS = {"attempt", "segments", "sequence", "reserve", "bytes", "failures", "deaths", "furthest"}
local DEAD_LETTERS_KEPT = 1000

local function unpacked(packed)
  local is_packed, value = pcall(cmsgpack.unpack, packed)
  return is_packed and type(value) == "table" and (value.v or 1) <= SCHEMA and value or nil
end

-- A worker may be the only one to meet a record: what it leaves here, "ready" tells the trainer. A function that only
-- reads leaves nothing.
local function damaged(K, what)
  redis.pcall("HSET", K.meta, "damaged", what)
  error("DAMAGED " .. what)
end

-- nil where it cannot be read
local function as_episode(packed)
  local state = unpacked(packed)
  if not state or type(state.token) ~= "string" or type(state.done) ~= "boolean" then
    return nil
  end
  if (state.v or 1) == 1 then
    for _, name in ipairs(COUNTERS_OF_OLD) do
      state[name] = state[name] or 0
    end
  end
  for _, name in ipairs(NUMBERS) do
    if type(state[name]) ~= "number" then
      return nil
    end
  end
  return state
end

local function pack_record(record)
  record.v = SCHEMA
  return cmsgpack.pack(record)
end

local function write_record(key, field, record)
  redis.call("HSET", key, field, pack_record(record))
end

-- nil when there is no such group
local function read_group(K, name)
  local packed = redis.call("HGET", K.groups, name)
  if not packed then
    return nil
  end
  local group = unpacked(packed)
  if not group or type(group.size) ~= "number" or type(group.done) ~= "number" then
    damaged(K, "record of group " .. name)
  end
  return group
end

-- ``state``: of the episode that somebody still works at, where there is one.
local function fence(state, what)
  return refuse("FENCED", (state and state.erased and "erased: " or "") .. what)
end

-- The worker of a holder; "" where its record cannot be read, and then its lease counts as ended.
local function worker_of(packed)
  local holder = unpacked(packed)
  return holder and type(holder.worker) == "string" and holder.worker or ""
end

local function held_name(token, episode)
  return token .. "/" .. episode
end

local function forget_idle_holder(K, token)
  -- "0" follows "/": the range is everything that this token holds
  local one = redis.call("ZRANGE", K.held, "[" .. token .. "/", "(" .. token .. "0", "BYLEX", "LIMIT", 0, 1)
  if #one == 0 then
    redis.call("HDEL", K.holders, token)
  end
end

local function stored_bytes(state)
  return state.bytes + (state.snapshot or 0) + (state.waits or 0)
end

-- What an episode counts for in the budget: what was reserved for it until it has ended, then what it really holds.
local function charge(state)
  if state.done or state.waits then
    return stored_bytes(state)
  end
  return math.max(state.reserve, stored_bytes(state))
end

-- Of an episode that waits for its reward: it no longer does.
local function stop_waiting(K, episode, state)
  if state.waits then
    redis.call("HDEL", K.rewards, episode)
    redis.call("ZREM", K.reward_deadlines, episode)
    state.waits = nil
  end
end

local function add_dead_letter(K, episode, state, reason)
  redis.call("XADD", K.dead_letters, "MAXLEN", DEAD_LETTERS_KEPT, "*", "episode", episode, "attempt", state.attempt,
    "segments", state.segments, "failures", state.failures, "reason", reason)
  redis.call("HINCRBY", K.meta, "dead_letters", 1)
end

-- Of an episode that has ended, or begins again: what was offered to agents, and the hold that one has of it.
local function drop_offer(K, episode)
  local packed = redis.call("HGET", K.offers, episode)
  if packed then
    local offer = unpacked(packed)
    if offer and offer.loan ~= "" then
      redis.call("HDEL", K.loans, offer.loan)
    end
    redis.call("HDEL", K.offers, episode)
    redis.call("ZREM", K.offered, episode)
  end
end

-- What was added to a world since it was stored: a record each, so that adding costs the same however large it has grown.
local function part_name(episode, number)
  return episode .. "/" .. number
end

local function drop_parts(K, episode, count)
  local fields = {}
  for number = 1, count do
    fields[number] = part_name(episode, number)
  end
  in_chunks(fields, function(some)
    redis.call("HDEL", K.snapshots, unpack(some))
  end)
end

-- Of an episode whose record cannot be read.
local function count_parts(K, episode)
  local count = 0
  while redis.call("HEXISTS", K.snapshots, part_name(episode, count + 1)) == 1 do
    count = count + 1
  end
  return count
end

-- Nobody knows what the unreadable record was charged, so both sums are made anew.
local function account_anew(K)
  local charged, stored = 0, 0
  for _, packed in ipairs(redis.call("HVALS", K.episodes)) do
    local state = as_episode(packed)
    if state then
      charged, stored = charged + charge(state), stored + stored_bytes(state)
    end
  end
  redis.call("HSET", K.meta, "charged_bytes", string.format("%.0f", charged), "stored_bytes",
    string.format("%.0f", stored))
end

local function release_from_all(K, episode)
  redis.call("ZREM", K.queue, episode)
  for _, name in ipairs(redis.call("ZRANGE", K.held, 0, -1)) do
    if string.sub(name, -#episode - 1) == "/" .. episode then
      redis.call("ZREM", K.held, name)
      forget_idle_holder(K, string.sub(name, 1, -#episode - 2))
    end
  end
end

local function settle_group_of_dead(K, episode)
  local name, dead_member = string.match(episode, "^(%d+):(%d+)$")
  local group = read_group(K, name)
  if not group then
    return
  end
  local done = 0
  for member = 0, group.size - 1 do
    local packed = redis.call("HGET", K.episodes, name .. ":" .. member)
    local state = packed and as_episode(packed)
    done = done + (state and state.done and 1 or 0)
  end
  group.done = done
  group.dead = (group.dead and group.dead .. "," or "") .. dead_member
  write_record(K.groups, name, group)
  if done == group.size and not redis.call("ZSCORE", K.ready, name) then
    redis.call("ZADD", K.ready, redis.call("HINCRBY", K.meta, "completions", 1), name)
  end
end

-- An episode whose record cannot be read ends without an outcome; its worker is fenced off by its next write.
local function bury(K, episode)
  local segments = 0
  while redis.call("HEXISTS", K.index, episode .. ":" .. segments) == 1 do
    segments = segments + 1
  end
  local state = {
    attempt = 0, segments = segments, token = "", sequence = 0, done = true, dead = true,
    reserve = 0, bytes = 0, failures = 0, deaths = 0, furthest = 0
  }
  release_from_all(K, episode)
  drop_parts(K, episode, count_parts(K, episode))
  redis.call("HDEL", K.snapshots, episode)
  redis.call("HDEL", K.rewards, episode)
  redis.call("ZREM", K.reward_deadlines, episode)
  drop_offer(K, episode)
  write_record(K.episodes, episode, state)
  account_anew(K)
  settle_group_of_dead(K, episode)
  add_dead_letter(K, episode, state, "the record of this episode in Redis cannot be read")
  return state
end

-- For functions that write: nil when there is no such episode; one that cannot be read is buried first.
local function read_episode(K, episode)
  local packed = redis.call("HGET", K.episodes, episode)
  if not packed then
    return nil
  end
  return as_episode(packed) or bury(K, episode)
end

-- For functions that only read.
local UNREADABLE = {
  attempt = 0, segments = 0, token = "", sequence = 0, done = true, dead = true,
  reserve = 0, bytes = 0, failures = 0, deaths = 0, furthest = 0
}

local function view_episode(K, episode)
  local packed = redis.call("HGET", K.episodes, episode)
  return packed and (as_episode(packed) or UNREADABLE) or nil
end

-- trainer token -> how many groups were open: everything of the queue is gone, for its trainer to dispatch again
register("empty_queue", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "emptying the queue")
  end
  local open = redis.call("HLEN", K.groups)
  if open > 0 then
    redis.call("HINCRBY", K.counters, "dropped_queue_damaged", open)
  end
  redis.call("UNLINK", K.groups, K.queue, K.episodes, K.index, K.segments, K.ready, K.held, K.holders, K.snapshots)
  -- Attempts are counted anew: what was said of one of before is not said of the one that has its number.
  redis.call("UNLINK", K.offers, K.offered, K.loans, K.rewards, K.reward_deadlines, K.posted)
  redis.call("HDEL", K.meta, "charged_bytes", "stored_bytes", "damaged")
  return open
end)
