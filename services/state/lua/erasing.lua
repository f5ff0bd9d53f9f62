-- Episodes that are erased while they are in the queue: nothing that was read or said in them stays here. Such an episode
-- is dead, and its group goes on without it. What a trainer is about to write into a batch log is sealed: it is not
-- erased here, but in that log.

-- Reasons of failures may quote what was said.
local function drop_letters(K, episode)
  for _, entry in ipairs(redis.call("XRANGE", K.dead_letters, "-", "+")) do
    if entry[2][2] == episode then
      redis.call("XDEL", K.dead_letters, entry[1])
    end
  end
end

local function and_member(list, member)
  return list and list .. "," .. member or member
end

-- episode -> "erased", also where it was before; "sealed" where its group goes into a batch log just now; "absent"
register("erase_episode", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local episode = args[1]
  local name, member = string.match(episode, "^(%d+):(%d+)$")
  local state = read_episode(K, episode)
  local group = state and read_group(K, name)
  if not group then
    return "absent"
  elseif state.erased then
    return "erased"
  elseif group.sealed and owns(K, group.sealed) then
    return "sealed"
  end
  local holder, has_outcome = state.token, state.done and not state.dead
  if not state.done then
    redis.call("ZREM", K.queue, episode)
    end_without_outcome(K, episode, state)
    if holder ~= "" then
      forget_idle_holder(K, holder)
    end
  end
  local charged, stored = charge(state), stored_bytes(state)
  delete_segments(K, episode, state.segments)
  state.segments, state.bytes, state.version, state.note = 0, 0, nil, nil
  state.dead, state.token, state.erased = true, "", true
  write_record(K.episodes, episode, state)
  account(K, charge(state) - charged, stored_bytes(state) - stored)
  group = read_group(K, name)
  group.dead = has_outcome and and_member(group.dead, member) or group.dead
  group.erased = and_member(group.erased, member)
  write_record(K.groups, name, group)
  drop_letters(K, episode)
  add_dead_letter(K, episode, state, "erased")
  return "erased"
end)

-- trainer token, then per group: its name, the members that go into a batch log ("0,1,3") -> 1; 0 where one of them was
-- erased or its group is gone, and then nothing is sealed. A seal ends with its group, or with the trainer.
register("seal", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, groups = args[1], {}
  if not owns(K, token) then
    return refuse("FENCED", "sealing groups")
  end
  for position = 2, #args, 2 do
    local name = args[position]
    local group = read_group(K, name)
    local erased = group and "," .. (group.erased or "") .. ","
    for member in string.gmatch(args[position + 1], "%d+") do
      if not erased or string.find(erased, "," .. member .. ",", 1, true) then
        return 0
      end
    end
    groups[name] = group
  end
  for name, group in pairs(groups) do
    group.sealed = token
    write_record(K.groups, name, group)
  end
  return 1
end)
