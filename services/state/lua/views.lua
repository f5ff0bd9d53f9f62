-- What can be read of the queue of one job.

-- -> token, worker, token, worker ... of all that hold episodes
register("holders", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local rows = {}
  local all = redis.call("HGETALL", K.holders)
  for position = 1, #all, 2 do
    rows[#rows + 1] = all[position]
    rows[#rows + 1] = worker_of(all[position + 1])
  end
  return rows
end)

local function stage_of(state)
  if state.dead then
    return "dead"
  elseif state.done then
    return "done"
  elseif state.waits then
    return "waiting"
  end
  return state.token == "" and "queued" or "held"
end

-- episode -> the worker that holds it, "" for none; with "erased" behind it: 1 if it was erased, else 0; with "stage": how
-- far it is, "gone" where its group is settled or its job is over. One function, so that a gateway needs no permission
-- that it did not have; functions from before "stage" answer with the worker then.
register("holder_of", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local state = view_episode(K, args[1])
  if args[2] == "erased" then
    return state and state.erased and 1 or 0
  elseif args[2] == "stage" then
    return state and stage_of(state) or "gone"
  end
  local packed = state and stage_of(state) == "held" and redis.call("HGET", K.holders, state.token)
  return packed and worker_of(packed) or ""
end)

-- episode -> its payloads in order
register("read_episode", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local state = view_episode(K, args[1])
  local payloads = {}
  for index = 0, (state and state.segments or 0) - 1 do
    local id = string.match(redis.call("HGET", K.index, args[1] .. ":" .. index), "^[^/]+")
    payloads[#payloads + 1] = redis.call("XRANGE", K.segments, id, id)[1][2][4]
  end
  return payloads
end)

-- -> rows of the complete groups, in order of completion; DAMAGED if anybody met a record that cannot be read
register("ready", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local what = redis.call("HGET", K.meta, "damaged")
  if what then
    damaged(K, what)
  end
  local rows = {}
  for _, name in ipairs(redis.call("ZRANGE", K.ready, 0, -1)) do
    local group = read_group(K, name)
    local row = {name, group.split, group.task, group.environment, group.size, group.dead or ""}
    if args[1] == "waited" or args[1] == "erased" then  -- trainers of earlier releases do not ask, and expect no more
      row[#row + 1] = group.waited or 0
    end
    if args[1] == "erased" then
      row[#row + 1] = group.erased or ""
    end
    rows[#rows + 1] = row
  end
  return rows
end)

-- -> name, count, ..., "in_flight", count; read at one instant, so that they add up
register("counters", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local counts = redis.call("HGETALL", K.counters)
  counts[#counts + 1] = "in_flight"
  counts[#counts + 1] = tostring(redis.call("HLEN", K.groups))
  return counts
end)

-- -> charged bytes, stored bytes, dead letters ever written
register("usage", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  return redis.call("HMGET", K.meta, "charged_bytes", "stored_bytes", "dead_letters")
end)

-- groups -> per group that exists: its name, split, task, environment, size, and per episode its stage, worker ("" for
-- none), attempt, segments, bytes, oldest version ("" for none), failures, note
register("inspect", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local workers, rows = {}, {}
  local all = redis.call("HGETALL", K.holders)
  for position = 1, #all, 2 do
    workers[all[position]] = worker_of(all[position + 1])
  end
  for _, name in ipairs(args) do
    local group = read_group(K, name)
    if group then
      local row = {name, group.split, group.task, group.environment, group.size}
      for member = 0, group.size - 1 do
        local state = view_episode(K, name .. ":" .. member) or UNREADABLE
        local stage = stage_of(state)
        row[#row + 1] = {
          stage, stage == "held" and workers[state.token] or "", state.attempt, state.segments,
          string.format("%.0f", state.bytes), state.version and tostring(state.version) or "", state.failures,
          state.note or ""
        }
      end
      rows[#rows + 1] = row
    end
  end
  return rows
end)
