-- Episodes that are set aside: interrupted, cancelled, and the worlds that they are in.

-- worker token, episodes: back into the queue behind everything that waits there now; those that it does not hold are
-- left alone
register("interrupt", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, count = args[1], 0
  for position = 2, #args do
    local episode = args[position]
    local state = read_episode(K, episode)
    if state and token ~= "" and state.token == token and not state.done then
      redis.call("ZREM", K.held, held_name(token, episode))
      state.token, state.sequence = "", redis.call("HINCRBY", K.meta, "sequence", 1)
      write_record(K.episodes, episode, state)
      redis.call("ZADD", K.queue, state.sequence, episode)
      count = count + 1
    end
  end
  forget_idle_holder(K, token)
  return count
end)

-- trainer token, group -> how many of its episodes had not ended: they end without an outcome, and the group is ready
register("cancel", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, name, count = args[1], args[2], 0
  if not owns(K, token) then
    return refuse("FENCED", "cancelling what is left of group " .. name)
  end
  local group = read_group(K, name)
  for member = 0, (group and group.size or 0) - 1 do
    local episode = name .. ":" .. member
    local state = read_episode(K, episode) or bury(K, episode)
    if not state.done then
      local holder = state.token
      redis.call("ZREM", K.queue, episode)
      end_without_outcome(K, episode, state)
      if holder ~= "" then
        forget_idle_holder(K, holder)
      end
      count = count + 1
    end
  end
  return count
end)

-- worker token, episode, attempt, number of segments, data: the world as it is after so many segments. An older one is
-- replaced; a resend changes nothing.
register("save_snapshot", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, episode, attempt, segments = args[1], args[2], tonumber(args[3]), tonumber(args[4])
  local state = read_episode(K, episode)
  if not state or token == "" or state.token ~= token or state.done or attempt < state.attempt then
    return fence(state, "snapshot of episode " .. episode)
  end
  if attempt > state.attempt or segments ~= state.segments then
    return refuse("GAP", "snapshot of episode " .. episode .. " after segment " .. segments .. " of attempt " .. attempt
      .. ", the server holds " .. state.segments .. " of attempt " .. state.attempt)
  end
  local charged, stored = charge(state), stored_bytes(state)
  drop_parts(K, episode, state.parts or 0)
  state.snapshot, state.parts, state.part = #args[5], nil, nil
  write_record(K.episodes, episode, state)
  write_record(K.snapshots, episode, {attempt = attempt, segments = segments, data = args[5]})
  account(K, charge(state) - charged, stored_bytes(state) - stored)
  return 1
end)

-- episode, "parts" -> {attempt, number of segments, data, what was added to it in order}, or nil. Who does not ask for
-- parts is of an earlier release: data without them would be the world of another time, so it is given none.
register("read_snapshot", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local episode = args[1]
  local packed = redis.call("HGET", K.snapshots, episode)
  local held = packed and unpacked(packed)
  local state = held and view_episode(K, episode)
  local num_parts = state and state.parts or 0
  if num_parts == 0 then
    return held and {held.attempt, held.segments, held.data}
  elseif args[2] ~= "parts" then
    return {held.attempt, held.segments, ""}
  end
  local found = {held.attempt, held.segments, held.data}
  for number = 1, num_parts do
    local part = redis.call("HGET", K.snapshots, part_name(episode, number))
    part = part and unpacked(part)
    if not part then
      return nil
    end
    found[2], found[number + 3] = part.segments, part.data
  end
  return found
end)

-- worker, its token, "epoch", episodes -> rows of those that are the worker's now: the ones that waited, and those that it held
register("take", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local worker, token, taken = args[1], args[2], {}
  if token == "" then
    return refuse("FENCED", "taking episodes")
  end
  local with_epoch = args[3] == "epoch"
  for position = with_epoch and 4 or 3, #args do
    local episode = args[position]
    local state = read_episode(K, episode)
    if state and not state.done and not state.waits and state.token == "" then
      redis.call("ZREM", K.queue, episode)
      state.token = token
      write_record(K.episodes, episode, state)
      redis.call("ZADD", K.held, 0, held_name(token, episode))
    end
    if state and not state.done and state.token == token then
      taken[#taken + 1] = episode
    end
  end
  if #taken > 0 then
    write_record(K.holders, token, {worker = worker, request = "", episodes = {}})
  end
  return describe(K, taken, with_epoch)
end)
