-- What belongs to no job: the list of jobs, idempotency keys, engines, workers and their leases.

-- digest of the client's key, job id -> the job id that this key names from now on
register("reserve", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  redis.call("HSETNX", K.idempotency, args[1], args[2])
  return redis.call("HGET", K.idempotency, args[1])
end)

-- job id: it is listed, and looked at by those who claim and serve jobs
register("announce", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  redis.call("ZADD", K.jobs, 0, args[1])
  redis.call("SADD", K.open_jobs, args[1])
  return 1
end)

-- kind ("engine" or "worker"), id, record
register("enlist", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  redis.call("HSET", K[args[1] .. "s"], args[2], args[3])
  return redis.call("HINCRBY", K[args[1] .. "_beats"], args[2], 1)
end)

-- kind, id: it is gone; an engine's binding goes with it
register("delist", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if args[1] == "engine" then
    redis.call("HDEL", K.engine_bindings, args[2])
    redis.call("HDEL", K.engine_states, args[2])
  end
  redis.call("HDEL", K[args[1] .. "_beats"], args[2])
  return redis.call("HDEL", K[args[1] .. "s"], args[2])
end)

-- engine, new binding, binding that may be replaced ("" for none) -> 1, or 0 when another holds it
register("bind_engine", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  local held = redis.call("HGET", K.engine_bindings, args[1]) or ""
  if redis.call("HEXISTS", K.engines, args[1]) == 0 then
    return refuse("MISSING", "engine " .. args[1])
  end
  if held ~= args[2] and held ~= args[3] then
    return 0
  end
  if held ~= args[2] then
    redis.call("HDEL", K.engine_states, args[1])
  end
  redis.call("HSET", K.engine_bindings, args[1], args[2])
  return 1
end)

-- engine, binding, state: only who holds the binding may say how the engine is
register("mark_engine", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.engine_bindings, args[1]) ~= args[2] then
    return 0
  end
  redis.call("HSET", K.engine_states, args[1], args[3])
  return 1
end)

-- engine, binding: only the binding that holds is taken away
register("unbind_engine", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.engine_bindings, args[1]) ~= args[2] then
    return 0
  end
  redis.call("HDEL", K.engine_states, args[1])
  return redis.call("HDEL", K.engine_bindings, args[1])
end)

-- worker, fresh token: whoever held the name before is fenced
register("join", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.lease_tokens, args[1]) ~= args[2] then
    redis.call("HSET", K.lease_tokens, args[1], args[2])
    redis.call("HSET", K.lease_beats, args[1], 0)
  end
  return 1
end)

register("beat", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.lease_tokens, args[1]) ~= args[2] then
    return refuse("FENCED", "beat of worker " .. args[1])
  end
  return redis.call("HINCRBY", K.lease_beats, args[1], 1)
end)

-- worker, token, beat ("" for any): ends the lease if it is still this one, and at this beat -> 1 or 0
register("end_lease", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.lease_tokens, args[1]) ~= args[2] then
    return 0
  end
  if args[3] ~= "" and redis.call("HGET", K.lease_beats, args[1]) ~= args[3] then
    return 0
  end
  redis.call("HDEL", K.lease_tokens, args[1])
  redis.call("HDEL", K.lease_beats, args[1])
  return 1
end)
