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
    rows[#rows + 1] = {name, group.split, group.task, group.environment, group.size, group.dead or ""}
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

local function stage_of(state)
  if state.dead then
    return "dead"
  elseif state.done then
    return "done"
  end
  return state.token == "" and "queued" or "held"
end

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
