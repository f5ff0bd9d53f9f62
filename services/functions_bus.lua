-- The queue of one job. An episode is named "group:member" and is in exactly one of these states: queued (in `queue`),
-- held (in `held`, its token is the worker's), done (its last segment is appended; the token stays, so that a resent
-- last append is recognized). A group is deleted with all that belongs to it by `commit`, and only by it.

-- Episodes that come back stand before all new ones, the oldest first: their score is lower by this.
local REQUEUED = 2 ^ 50

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

local function requeue(K, episode, state)
  redis.call("ZREM", K.held, held_name(state.token, episode))
  state.token = ""
  write_packed(K.episodes, episode, state)
  redis.call("ZADD", K.queue, state.sequence - REQUEUED, episode)
end

local function delete_segments(K, episode, num_segments)
  local fields = {}
  for index = 0, num_segments - 1 do
    fields[#fields + 1] = episode .. ":" .. index
  end
  in_chunks(fields, function(some)
    local ids = {}
    for _, entry in ipairs(redis.call("HMGET", K.index, unpack(some))) do
      ids[#ids + 1] = string.match(entry, "^[^/]+")
    end
    redis.call("XDEL", K.segments, unpack(ids))
    redis.call("HDEL", K.index, unpack(some))
  end)
end

-- trainer token, group, size, split, task, environment -> 1, or 0 when the group exists
register("dispatch", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, group, size = args[1], args[2], tonumber(args[3])
  if not owns(K, token) then
    return refuse("FENCED", "dispatch of group " .. group)
  end
  if redis.call("HEXISTS", K.groups, group) == 1 then
    return 0
  end
  local sequence = redis.call("HINCRBY", K.meta, "sequence", 1)
  write_packed(K.groups, group, {size = size, done = 0, split = args[4], task = args[5], environment = args[6]})
  for member = 0, size - 1 do
    local episode = group .. ":" .. member
    write_packed(K.episodes, episode, {attempt = 0, segments = 0, token = "", sequence = sequence, done = false})
    redis.call("ZADD", K.queue, sequence, episode)
  end
  redis.call("HINCRBY", K.counters, "dispatched", 1)
  return 1
end)

local function describe(K, episodes)
  local rows = {}
  for _, episode in ipairs(episodes) do
    local state = read_packed(K.episodes, episode)
    local group_name, member = string.match(episode, "^(%d+):(%d+)$")
    local group = state and read_packed(K.groups, group_name)
    if group then
      rows[#rows + 1] = {
        group_name, member, state.attempt, state.segments, group.split, group.task, group.environment, group.size
      }
    end
  end
  return rows
end

-- worker, its token, request, limit -> rows. A request that is asked again is answered again with the same episodes.
register("lease", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local worker, token, request, limit = args[1], args[2], args[3], tonumber(args[4])
  local holder = read_packed(K.holders, token)
  if holder and holder.request == request then
    return describe(K, holder.episodes)
  end
  local episodes = {}
  local popped = redis.call("ZPOPMIN", K.queue, limit)
  for position = 1, #popped, 2 do
    local episode = popped[position]
    local state = read_packed(K.episodes, episode)
    state.token = token
    write_packed(K.episodes, episode, state)
    redis.call("ZADD", K.held, 0, held_name(token, episode))
    episodes[#episodes + 1] = episode
  end
  if #episodes > 0 then
    write_packed(K.holders, token, {worker = worker, request = request, episodes = episodes})
  end
  return describe(K, episodes)
end)

-- One append against the state as it will be after those before it: the write to make, nil for a resend, or a refusal.
local function check_append(K, token, state, append, fresh)
  local name = append.episode .. ":" .. append.index
  if not state or token == "" or state.token ~= token or append.attempt < state.attempt then
    return nil, refuse("FENCED", "append of segment " .. name)
  end
  if append.attempt > state.attempt or append.index > state.segments then
    return nil, refuse("GAP", "segment " .. name .. " of attempt " .. append.attempt .. ", the server holds "
      .. state.segments .. " of attempt " .. state.attempt)
  end
  if append.index < state.segments then
    local digest = fresh[name] or string.match(redis.call("HGET", K.index, name), "[^/]+$")
    if digest ~= append.digest then
      return nil, refuse("CONFLICT", "segment " .. name)
    end
    return nil
  end
  if state.done then
    return nil, refuse("CONFLICT", "segment " .. name .. " after the last one of its episode")
  end
  fresh[name] = append.digest
  state.segments = state.segments + 1
  state.done = append.final
  return append
end

local function finish_episode(K, token, episode)
  redis.call("ZREM", K.held, held_name(token, episode))
  local group_name = string.match(episode, "^%d+")
  local group = read_packed(K.groups, group_name)
  group.done = group.done + 1
  write_packed(K.groups, group_name, group)
  if group.done == group.size then
    redis.call("ZADD", K.ready, redis.call("HINCRBY", K.meta, "completions", 1), group_name)
  end
end

-- worker token, then per segment: episode, attempt, index, final, digest, payload. All of it or nothing is written.
register("append", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token = args[1]
  local states, fresh, writes = {}, {}, {}
  for position = 2, #args, 6 do
    local append = {
      episode = args[position], attempt = tonumber(args[position + 1]), index = tonumber(args[position + 2]),
      final = args[position + 3] == "1", digest = args[position + 4], payload = args[position + 5]
    }
    local episode = append.episode
    states[episode] = states[episode] or read_packed(K.episodes, episode)
    local write, refusal = check_append(K, token, states[episode], append, fresh)
    if refusal then
      return refusal
    end
    writes[#writes + 1] = write
  end
  for _, write in ipairs(writes) do
    local name = write.episode .. ":" .. write.index
    local id = redis.call("XADD", K.segments, "*", "s", name .. ":" .. write.attempt, "d", write.payload)
    redis.call("HSET", K.index, name, id .. "/" .. write.digest)
    write_packed(K.episodes, write.episode, states[write.episode])
    if write.final then
      finish_episode(K, token, write.episode)
      forget_idle_holder(K, token)
    end
  end
  return #writes
end)

-- worker token, episode, attempt: the segments of the attempt before it are gone
register("restart", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, episode, attempt = args[1], args[2], tonumber(args[3])
  local state = read_packed(K.episodes, episode)
  if not state or token == "" or state.token ~= token or state.done or attempt < state.attempt then
    return refuse("FENCED", "restart of episode " .. episode .. " as attempt " .. attempt)
  end
  if attempt == state.attempt then
    return 0
  end
  if attempt > state.attempt + 1 then
    return refuse("GAP", "attempt " .. attempt .. " of episode " .. episode .. ", the server knows " .. state.attempt)
  end
  delete_segments(K, episode, state.segments)
  state.attempt, state.segments = attempt, 0
  write_packed(K.episodes, episode, state)
  return 1
end)

-- worker token, episodes: back to the head of the queue; those that it does not hold are left alone
register("hand_back", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, count = args[1], 0
  for position = 2, #args do
    local episode = args[position]
    local state = read_packed(K.episodes, episode)
    if state and token ~= "" and state.token == token and not state.done then
      requeue(K, episode, state)
      count = count + 1
    end
  end
  forget_idle_holder(K, token)
  return count
end)

-- worker token -> how many episodes came back, all that it held. The caller has made sure that the lease is over.
register("requeue", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token = args[1]
  local names = redis.call("ZRANGE", K.held, "[" .. token .. "/", "(" .. token .. "0", "BYLEX")
  for _, name in ipairs(names) do
    local episode = string.sub(name, #token + 2)
    requeue(K, episode, read_packed(K.episodes, episode))
  end
  redis.call("HDEL", K.holders, token)
  return #names
end)

-- -> token, worker, token, worker ... of all that hold episodes
register("holders", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local rows = {}
  local all = redis.call("HGETALL", K.holders)
  for position = 1, #all, 2 do
    rows[#rows + 1] = all[position]
    rows[#rows + 1] = cmsgpack.unpack(all[position + 1]).worker
  end
  return rows
end)

-- episode -> its payloads in order
register("read_episode", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local state = read_packed(K.episodes, args[1])
  local payloads = {}
  for index = 0, (state and state.segments or 0) - 1 do
    local id = string.match(redis.call("HGET", K.index, args[1] .. ":" .. index), "^[^/]+")
    payloads[#payloads + 1] = redis.call("XRANGE", K.segments, id, id)[1][2][4]
  end
  return payloads
end)

-- -> rows of the complete groups, in order of completion
register("ready", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local rows = {}
  for _, name in ipairs(redis.call("ZRANGE", K.ready, 0, -1)) do
    local group = read_packed(K.groups, name)
    rows[#rows + 1] = {name, group.split, group.task, group.environment, group.size}
  end
  return rows
end)

local function delete_group(K, name, group)
  for member = 0, group.size - 1 do
    local episode = name .. ":" .. member
    local state = read_packed(K.episodes, episode)
    delete_segments(K, episode, state.segments)
    redis.call("HDEL", K.episodes, episode)
    redis.call("ZREM", K.queue, episode)
    if state.token ~= "" and not state.done then
      redis.call("ZREM", K.held, held_name(state.token, episode))
      forget_idle_holder(K, state.token)
    end
  end
  redis.call("HDEL", K.groups, name)
  redis.call("ZREM", K.ready, name)
end

-- trainer token, step, reason, groups -> how many existed. A group that is gone already is passed over.
register("commit", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, step, reason = args[1], tonumber(args[2]), args[3]
  if not owns(K, token) then
    return refuse("FENCED", "commit of step " .. step)
  end
  local count = 0
  for position = 4, #args do
    local name = args[position]
    local group = read_packed(K.groups, name)
    if group then
      delete_group(K, name, group)
      redis.call("HINCRBY", K.counters, reason, 1)
      count = count + 1
    end
  end
  if reason == "trained" and step > number_of(K.meta, "committed_step") then
    redis.call("HSET", K.meta, "committed_step", step)
  end
  return count
end)

-- -> name, count, ..., "in_flight", count; read at one instant, so that they add up
register("counters", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local counts = redis.call("HGETALL", K.counters)
  counts[#counts + 1] = "in_flight"
  counts[#counts + 1] = tostring(redis.call("HLEN", K.groups))
  return counts
end)
