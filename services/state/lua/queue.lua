-- The queue of one job. An episode is named "group:member" and is in exactly one of these states: queued (in `queue`),
-- held (in `held`, its token is the worker's), waiting for its reward (rewards.lua), done (its last segment is appended; the token stays, so that a resent
-- last append is recognized), dead (done too, but without an outcome: it failed too often). A group is deleted with all
-- that belongs to it by `commit`, and only by it.

-- Episodes that come back stand before all new ones: first suspects, then those that hold tokens, by their oldest
-- version, then those that hold none. New ones have their (positive) sequence as score; all scores stay within the 2^53
-- of a double.
local SUSPECTS, WITH_TOKENS, WITHOUT_TOKENS = -2 ^ 53, -2 ^ 52, -2 ^ 50
local SEQUENCES, HIGHEST_VERSION = 2 ^ 31, 2 ^ 20

-- So many leases in a row that end without a segment more than ever before: the next worker would fare no better.
local MAX_FAILURES = 3
-- So many deaths of its workers in a row, and no progress either: it may be what kills them. Until it gets any further a
-- worker holds no other such suspect beside it, and from now on a death counts as its failure. Before that the death of
-- a worker is no fault of an episode: it had many.
local MAX_DEATHS = 3

local function is_suspect(state)
  return state.deaths >= MAX_DEATHS and state.segments <= state.furthest
end

local function requeue(K, episode, state)
  redis.call("ZREM", K.held, held_name(state.token, episode))
  state.token = ""
  write_record(K.episodes, episode, state)
  local score = WITHOUT_TOKENS + state.sequence
  if state.version then
    score = WITH_TOKENS + math.min(state.version, HIGHEST_VERSION) * SEQUENCES + state.sequence
  end
  if is_suspect(state) then
    score = SUSPECTS + state.sequence
  end
  redis.call("ZADD", K.queue, score, episode)
end

-- Of an episode that has ended, or that starts again.
local function drop_snapshot(K, episode, state)
  if state.snapshot then
    redis.call("HDEL", K.snapshots, episode)
    drop_parts(K, episode, state.parts or 0)
    state.snapshot, state.parts, state.part = nil, nil, nil
  end
end

local function account(K, charged, stored)
  if charged ~= 0 then
    redis.call("HINCRBY", K.meta, "charged_bytes", string.format("%.0f", charged))
  end
  if stored ~= 0 then
    redis.call("HINCRBY", K.meta, "stored_bytes", string.format("%.0f", stored))
  end
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

-- trainer token, group, size, split, task, environment, bytes to reserve for each episode, budget in bytes ("" for
-- none), the newest schema of segments that the trainer reads (absent: of an earlier release) -> 1, or 0 when the group
-- exists
register("dispatch", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, group, size, reserve, budget = args[1], args[2], tonumber(args[3]), tonumber(args[7]), tonumber(args[8])
  if not owns(K, token) then
    return refuse("FENCED", "dispatch of group " .. group)
  end
  if redis.call("HEXISTS", K.groups, group) == 1 then
    return 0
  end
  local charged = number_of(K.meta, "charged_bytes")
  if budget and charged + size * reserve > budget then
    return refuse("FULL", "group " .. group .. ": " .. charged .. " of " .. args[8] .. " bytes are taken")
  end
  local sequence = redis.call("HINCRBY", K.meta, "sequence", 1)
  write_record(K.groups, group, {
    size = size, done = 0, split = args[4], task = args[5], environment = args[6], epoch = number_of(K.trainer, "epoch"),
    reads = tonumber(args[9]) or 0
  })
  for member = 0, size - 1 do
    local episode = group .. ":" .. member
    write_record(K.episodes, episode, {
      attempt = 0, segments = 0, token = "", sequence = sequence, done = false,
      reserve = reserve, bytes = 0, failures = 0, deaths = 0, furthest = 0
    })
    redis.call("ZADD", K.queue, sequence, episode)
  end
  account(K, size * reserve, 0)
  redis.call("HINCRBY", K.counters, "dispatched", 1)
  return 1
end)

-- ``with_epoch``: workers of earlier releases do not ask for it, and expect no more.
local function describe(K, episodes, with_epoch)
  local rows = {}
  for _, episode in ipairs(episodes) do
    local state = view_episode(K, episode)
    local group_name, member = string.match(episode, "^(%d+):(%d+)$")
    local group = state and state ~= UNREADABLE and read_group(K, group_name)
    if group then
      rows[#rows + 1] = {
        group_name, member, state.attempt, state.segments, group.split, group.task, group.environment, group.size,
        state.failures, state.note or "", with_epoch and (group.epoch or 0) or nil,
        with_epoch and (group.reads or 0) or nil
      }
    end
  end
  return rows
end

local function holds_a_suspect(K, token)
  local found = false
  in_chunks(redis.call("ZRANGE", K.held, "[" .. token .. "/", "(" .. token .. "0", "BYLEX"), function(names)
    for position, name in ipairs(names) do
      names[position] = string.sub(name, #token + 2)
    end
    for _, packed in ipairs(redis.call("HMGET", K.episodes, unpack(names))) do
      local state = packed and as_episode(packed)
      found = found or (state and is_suspect(state))
    end
  end)
  return found
end

-- Episodes of the queue from this place on.
local function take(K, place, count)
  local episodes = count > 0 and redis.call("ZRANGE", K.queue, place, place + count - 1) or {}
  in_chunks(episodes, function(some)
    redis.call("ZREM", K.queue, unpack(some))
  end)
  return episodes
end

-- worker, its token, request, limit, "epoch" -> rows. A request that is asked again is answered again with the same episodes.
register("lease", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local worker, token, request, limit = args[1], args[2], args[3], tonumber(args[4])
  local with_epoch = args[5] == "epoch"
  local packed = redis.call("HGET", K.holders, token)
  local holder = packed and unpacked(packed)
  if holder and holder.request == request then
    return describe(K, holder.episodes, with_epoch)
  end
  local num_suspects = #redis.call("ZRANGE", K.queue, "-inf", "(" .. string.format("%.0f", WITH_TOKENS), "BYSCORE")
  local waiting, episodes = {}, {}
  if num_suspects > 0 and limit > 0 and not holds_a_suspect(K, token) then
    waiting = take(K, 0, 1)
    num_suspects = num_suspects - 1
  end
  for _, episode in ipairs(take(K, num_suspects, limit - #waiting)) do
    waiting[#waiting + 1] = episode
  end
  for _, episode in ipairs(waiting) do
    local state = read_episode(K, episode)
    if state and not state.done then
      state.token = token
      write_record(K.episodes, episode, state)
      redis.call("ZADD", K.held, 0, held_name(token, episode))
      episodes[#episodes + 1] = episode
    end
  end
  if #episodes > 0 then
    write_record(K.holders, token, {worker = worker, request = request, episodes = episodes})
  end
  return describe(K, episodes, with_epoch)
end)

-- One append against the state as it will be after those before it: the write to make, nil for a resend, or a refusal.
local function check_append(K, token, state, append, fresh)
  local name = append.episode .. ":" .. append.index
  if not state or token == "" or state.token ~= token or append.attempt < state.attempt then
    return nil, fence(state, "append of segment " .. name)
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
  state.bytes = state.bytes + #append.payload
  state.done = append.final
  if append.version then
    state.version = math.min(state.version or append.version, append.version)
  end
  if append.note ~= "" then
    state.note = append.note
  end
  return append
end

-- One world, or a part of one, against the state as it will be after the appends before it: whether to write it, or a
-- refusal. One that the episode has gone on from is a resend, and so is a part that the last one equals.
local function check_world(token, state, world)
  if not state or token == "" or state.token ~= token or world.attempt < state.attempt then
    return false, fence(state, "snapshot of episode " .. world.episode)
  end
  if world.attempt > state.attempt or world.index > state.segments then
    return false, refuse("GAP", "snapshot of episode " .. world.episode .. " after segment " .. world.index
      .. " of attempt " .. world.attempt .. ", the server holds " .. state.segments .. " of attempt " .. state.attempt)
  end
  if world.index < state.segments or state.done then
    return false
  end
  if world.is_part and state.snapshot then
    if state.part == world.digest then
      return false
    end
    state.parts = (state.parts or 0) + 1
    state.snapshot, state.part, world.number = state.snapshot + #world.payload, world.digest, state.parts
    return true
  end
  world.num_replaced = state.parts or 0
  state.snapshot, state.parts, state.part = #world.payload, nil, world.is_part and world.digest or nil
  return true
end

-- In the order in which they were checked. ``is_over``: nothing is kept of an episode that has ended.
local function keep_world(K, world, is_over)
  if world.num_replaced then
    drop_parts(K, world.episode, world.num_replaced)
  end
  if is_over then
    return
  elseif world.number then
    write_record(K.snapshots, part_name(world.episode, world.number), {segments = world.index, data = world.payload})
  else
    write_record(K.snapshots, world.episode, {attempt = world.attempt, segments = world.index, data = world.payload})
  end
end

local function finish_episode(K, token, episode, is_dead)
  redis.call("ZREM", K.held, held_name(token, episode))
  local group_name, member = string.match(episode, "^(%d+):(%d+)$")
  local group = read_group(K, group_name)
  group.done = group.done + 1
  if is_dead then
    group.dead = (group.dead and group.dead .. "," or "") .. member
  end
  write_record(K.groups, group_name, group)
  if group.done == group.size then
    redis.call("ZADD", K.ready, redis.call("HINCRBY", K.meta, "completions", 1), group_name)
  end
end

-- The states of the episodes that ``appends`` name, in one read for all.
local function states_of(K, appends)
  local episodes, states = {}, {}
  for _, append in ipairs(appends) do
    if states[append.episode] == nil then
      states[append.episode] = false
      episodes[#episodes + 1] = append.episode
    end
  end
  in_chunks(episodes, function(some)
    for position, packed in ipairs(redis.call("HMGET", K.episodes, unpack(some))) do
      states[some[position]] = packed and (as_episode(packed) or bury(K, some[position])) or nil
    end
  end)
  return states
end

local function store_segments(K, writes)
  local entries = {}
  for _, write in ipairs(writes) do
    local name = write.episode .. ":" .. write.index
    local id = redis.call("XADD", K.segments, "*", "s", name .. ":" .. write.attempt, "d", write.payload)
    entries[#entries + 1], entries[#entries + 2] = name, id .. "/" .. write.digest
  end
  write_fields(K.index, entries)
end

-- worker token, then per segment: episode, attempt, index, final, version ("" if unknown), digest, payload, note (what
-- can be looked at while the episode runs; no part of the segment). In the place of ``final``, "world" says that this is
-- the world as it is after ``index`` segments; it replaces an older one. "part": it is added behind the one that is
-- there, and is the first of it where none is. All of it or nothing is written.
register("append", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, appends, worlds = args[1], {}, {}
  for position = 2, #args, 8 do
    appends[#appends + 1] = {
      episode = args[position], attempt = tonumber(args[position + 1]), index = tonumber(args[position + 2]),
      final = args[position + 3] == "1", is_part = args[position + 3] == "part",
      is_world = args[position + 3] == "world" or args[position + 3] == "part", version = tonumber(args[position + 4]), digest = args[position + 5],
      payload = args[position + 6], note = args[position + 7]
    }
  end
  local states, fresh, writes, charged, stored = states_of(K, appends), {}, {}, 0, 0
  for _, state in pairs(states) do
    charged, stored = charged - charge(state), stored - stored_bytes(state)
  end
  for _, append in ipairs(appends) do
    local state, write, refusal = states[append.episode], nil, nil
    if append.is_world then
      write, refusal = check_world(token, state, append)
      worlds[#worlds + 1] = write and append or nil
    else
      write, refusal = check_append(K, token, state, append, fresh)
      writes[#writes + 1] = write
    end
    if refusal then
      return refusal
    end
  end
  if #writes == 0 and #worlds == 0 then
    return 0
  end
  local changed = {}
  for episode, state in pairs(states) do
    if state.done then
      drop_snapshot(K, episode, state)
      drop_offer(K, episode)
    end
    charged, stored = charged + charge(state), stored + stored_bytes(state)
    changed[#changed + 1], changed[#changed + 2] = episode, pack_record(state)
  end
  write_fields(K.episodes, changed)
  account(K, charged, stored)
  store_segments(K, writes)
  for _, world in ipairs(worlds) do
    keep_world(K, world, states[world.episode].done)
  end
  for _, write in ipairs(writes) do
    if write.final then
      finish_episode(K, token, write.episode)
      forget_idle_holder(K, token)
    end
  end
  return #writes
end)

-- worker token, episode, attempt, note, then per segment that the new attempt begins with: version ("" if unknown),
-- digest, payload. The segments of the attempt before it are gone; so is its world, unless it stands after just these.
register("restart", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, episode, attempt, num_kept = args[1], args[2], tonumber(args[3]), (#args - 4) / 3
  local state = read_episode(K, episode)
  if not state or token == "" or state.token ~= token or state.done or attempt < state.attempt then
    return fence(state, "restart of episode " .. episode .. " as attempt " .. attempt)
  end
  if attempt == state.attempt then
    return 0
  end
  if attempt > state.attempt + 1 then
    return refuse("GAP", "attempt " .. attempt .. " of episode " .. episode .. ", the server knows " .. state.attempt)
  end
  local kept_world = num_kept > 0 and redis.call("HGET", K.snapshots, episode)
  local world = kept_world and unpacked(kept_world)
  if num_kept > 0 and (state.parts or not (world and world.segments == num_kept)) then
    return refuse("GAP", "attempt " .. attempt .. " of episode " .. episode .. " from segment " .. num_kept
      .. " on, where no world was kept")
  end
  delete_segments(K, episode, state.segments)
  drop_offer(K, episode)
  local charged, stored = charge(state), stored_bytes(state)
  -- How far the old attempt came is remembered: a new one that does not get further is no progress.
  state.furthest = math.max(state.furthest, state.segments)
  state.attempt, state.segments, state.bytes, state.version = attempt, 0, 0, nil
  state.note = args[4] ~= "" and args[4] or nil
  if world then
    world.attempt = attempt
    write_record(K.snapshots, episode, world)
    local kept = {}
    for position = 5, #args, 3 do
      local version, payload = tonumber(args[position]), args[position + 2]
      kept[#kept + 1] = {
        episode = episode, index = #kept, attempt = attempt, digest = args[position + 1], payload = payload
      }
      state.segments, state.bytes = #kept, state.bytes + #payload
      if version then
        state.version = math.min(state.version or version, version)
      end
    end
    store_segments(K, kept)
  else
    drop_snapshot(K, episode, state)
  end
  write_record(K.episodes, episode, state)
  account(K, charge(state) - charged, stored_bytes(state) - stored)
  return 1
end)

-- worker token, episodes: back to the head of the queue; those that it does not hold are left alone
register("hand_back", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, count = args[1], 0
  for position = 2, #args do
    local episode = args[position]
    local state = read_episode(K, episode)
    if state and token ~= "" and state.token == token and not state.done then
      requeue(K, episode, state)
      count = count + 1
    end
  end
  forget_idle_holder(K, token)
  return count
end)

local function end_without_outcome(K, episode, state)
  local charged, stored, token = charge(state), stored_bytes(state), state.token
  drop_snapshot(K, episode, state)
  stop_waiting(K, episode, state)
  drop_offer(K, episode)
  state.done, state.dead, state.token = true, true, ""
  write_record(K.episodes, episode, state)
  account(K, charge(state) - charged, stored_bytes(state) - stored)
  finish_episode(K, token, episode, true)
end

-- A lease of this episode ended badly: it goes back to the queue, or to the dead letters when that has happened too often.
local function fail_episode(K, episode, state, reason, is_death)
  if state.segments > state.furthest then
    state.furthest, state.failures, state.deaths = state.segments, 0, 0
  elseif is_death and not is_suspect(state) then
    state.deaths = state.deaths + 1
  else
    state.failures = state.failures + 1
  end
  if state.failures < MAX_FAILURES then
    requeue(K, episode, state)
    return
  end
  end_without_outcome(K, episode, state)
  add_dead_letter(K, episode, state, reason)
end

-- worker token, episode, reason -> 1, or 0 when it does not hold it (any more)
register("fail", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, episode = args[1], args[2]
  local state = read_episode(K, episode)
  if not state or token == "" or state.token ~= token or state.done then
    return 0
  end
  fail_episode(K, episode, state, args[3], false)
  forget_idle_holder(K, token)
  return 1
end)

-- worker token, reason -> how many episodes it held: all of them are taken away. The caller has made sure that the lease
-- is over.
register("requeue", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token = args[1]
  local names = redis.call("ZRANGE", K.held, "[" .. token .. "/", "(" .. token .. "0", "BYLEX")
  for _, name in ipairs(names) do
    local episode = string.sub(name, #token + 2)
    local state = read_episode(K, episode)
    if state and not state.done then
      fail_episode(K, episode, state, args[2], true)
    end
  end
  redis.call("HDEL", K.holders, token)
  return #names
end)

local function delete_group(K, name, group)
  local charged, stored = 0, 0
  for member = 0, group.size - 1 do
    local episode = name .. ":" .. member
    local state = read_episode(K, episode) or bury(K, episode)
    charged, stored = charged + charge(state), stored + stored_bytes(state)
    drop_snapshot(K, episode, state)
    stop_waiting(K, episode, state)
    drop_offer(K, episode)
    delete_segments(K, episode, state.segments)
    redis.call("HDEL", K.episodes, episode)
    redis.call("ZREM", K.queue, episode)
    if state.token ~= "" and not state.done then
      redis.call("ZREM", K.held, held_name(state.token, episode))
      forget_idle_holder(K, state.token)
    end
  end
  account(K, -charged, -stored)
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
    local group = read_group(K, name)
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
