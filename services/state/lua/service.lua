-- What belongs to no job: the list of jobs, idempotency keys, engines, trainers, workers and their leases.

local IDEMPOTENCY_KEPT = 10000

-- How long the dead are listed, in signs of life that the others of their kind give, each: no clock decides. All give one
-- every few seconds; for engines those do that know their addresses.
local SILENCE = {worker = 300, trainer = 300, engine = 300}

-- digest of the client's key, job id, "rebuilt" (absent: of a rebuild, or where jobs have no directories) -> the job id
-- that this key names from now on; "" while the keys of a server that was wiped have not been brought back
register("reserve", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if args[3] and redis.call("HEXISTS", K.rebuild, "done") == 0 then
    return ""
  end
  if redis.call("HSETNX", K.idempotency, args[1], args[2]) == 1 then
    local newest = redis.call("ZRANGE", K.idempotency_order, 0, 0, "REV", "WITHSCORES")
    redis.call("ZADD", K.idempotency_order, (tonumber(newest[2]) or 0) + 1, args[1])
    if redis.call("ZCARD", K.idempotency_order) > IDEMPOTENCY_KEPT then
      redis.call("HDEL", K.idempotency, redis.call("ZPOPMIN", K.idempotency_order)[1])
    end
  end
  return redis.call("HGET", K.idempotency, args[1])
end)

-- job id: it is listed, and looked at by those who claim and serve jobs
register("announce", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  redis.call("ZADD", K.jobs, 0, args[1])
  redis.call("SADD", K.open_jobs, args[1])
  return 1
end)

-- job id, digest of its idempotency key: the key may name another job
register("release_key", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.idempotency, args[2]) == args[1] then
    redis.call("HDEL", K.idempotency, args[2])
    redis.call("ZREM", K.idempotency_order, args[2])
  end
  return 1
end)

-- job id: it is listed no more
register("withdraw_job", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  redis.call("SREM", K.open_jobs, args[1])
  return redis.call("ZREM", K.jobs, args[1])
end)

-- A worker that is gone leaves its place, if no other has it by now.
local function leave_place(K, worker)
  local place = redis.call("HGET", K.placed, worker)
  local held = place and read_packed(K.places, place)
  if held and held.worker == worker then
    redis.call("HDEL", K.places, place)
  end
  redis.call("HDEL", K.placed, worker)
end

local function forget(K, kind, name)
  redis.call("ZREM", K[kind .. "_signs"], name)
  redis.call("HDEL", K[kind .. "_beats"], name)
  if kind == "worker" then
    leave_place(K, name)
    -- A lease that nobody renews; the episodes that it holds are found by their token, which is right no more.
    redis.call("HDEL", K.lease_tokens, name)
    redis.call("HDEL", K.lease_beats, name)
  end
  return redis.call("HDEL", K[kind .. "s"], name)
end

local function give_sign(K, kind, name)
  local signs = K[kind .. "_signs"]
  local now = redis.call("HINCRBY", K.signs, kind, 1)
  redis.call("ZADD", signs, now, name)
  local silent_since = now - SILENCE[kind] * redis.call("ZCARD", signs)
  if silent_since > 0 then
    for _, silent in ipairs(redis.call("ZRANGE", signs, 0, silent_since, "BYSCORE", "LIMIT", 0, 10)) do
      if kind ~= "engine" or redis.call("HEXISTS", K.engine_bindings, silent) == 0 then
        forget(K, kind, silent)
      end
    end
  end
end

-- kind ("engine", "trainer" or "worker"), id, record
register("enlist", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  redis.call("HSET", K[args[1] .. "s"], args[2], args[3])
  give_sign(K, args[1], args[2])
  return redis.call("HINCRBY", K[args[1] .. "_beats"], args[2], 1)
end)

-- kind, id: it is gone; an engine's binding goes with it, a worker's lease is ended by `end_lease`
register("delist", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if args[1] == "engine" then
    redis.call("HDEL", K.engine_bindings, args[2])
    redis.call("HDEL", K.engine_states, args[2])
  end
  redis.call("HDEL", K[args[1] .. "_beats"], args[2])
  if args[1] ~= "worker" or redis.call("HEXISTS", K.lease_tokens, args[2]) == 0 then
    redis.call("ZREM", K[args[1] .. "_signs"], args[2])
  end
  return redis.call("HDEL", K[args[1] .. "s"], args[2])
end)

-- Entries are only there to be waited for: who missed some reads all engines again anyway.
local NEWS_KEPT = 16

local function tell_engine(K, name)
  redis.call("XADD", K.engine_news, "MAXLEN", NEWS_KEPT, "*", "e", name)
end

-- fresh token, token and beats that may be replaced ("" for none) -> token and beats of whoever looks at the engines
register("hold_engine_watch", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  local held = redis.call("HGET", K.engine_watch, "token")
  local is_stale = held == args[2] and redis.call("HGET", K.engine_watch, "beats") == args[3]
  if not held or held == args[1] or is_stale then
    held = args[1]
    redis.call("HSET", K.engine_watch, "token", held)
    redis.call("HINCRBY", K.engine_watch, "beats", 1)
  end
  return {held, redis.call("HGET", K.engine_watch, "beats")}
end)

register("leave_engine_watch", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.engine_watch, "token") ~= args[1] then
    return 0
  end
  return redis.call("HDEL", K.engine_watch, "token")
end)

-- token, then engine and sighting in turn ("": it is no longer looked at) -> 1, or 0 when another looks at them now
register("sight_engines", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.engine_watch, "token") ~= args[1] then
    return 0
  end
  for index = 2, #args, 2 do
    if args[index + 1] == "" then
      redis.call("HDEL", K.engine_sightings, args[index])
    else
      redis.call("HSET", K.engine_sightings, args[index], args[index + 1])
    end
  end
  redis.call("HINCRBY", K.engine_watch, "beats", 1)
  if #args > 1 then
    tell_engine(K, "")
  end
  return 1
end)

-- engine, new binding, binding that may be replaced ("" for none) -> 1, or 0 when another holds it
register("bind_engine", FREES, function(keys, args)
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
  tell_engine(K, args[1])
  return 1
end)

-- engine, binding, state: only who holds the binding may say how the engine is
register("mark_engine", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.engine_bindings, args[1]) ~= args[2] then
    return 0
  end
  redis.call("HSET", K.engine_states, args[1], args[3])
  tell_engine(K, args[1])
  return 1
end)

-- engine, binding: only the binding that holds is taken away
register("unbind_engine", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.engine_bindings, args[1]) ~= args[2] then
    return 0
  end
  redis.call("HDEL", K.engine_states, args[1])
  tell_engine(K, args[1])
  return redis.call("HDEL", K.engine_bindings, args[1])
end)

-- The generation in which the worker has the place from now on; 0 where it has none, because another process took it
-- later. Who comes for the first time says 0 and is the next generation: its predecessor's lease is over, and so is that
-- one's entry in the list. Who comes again says its own, which no wiped server takes from it.
local function take_place(K, place, worker, token, generation)
  if redis.call("HGET", K.placed, worker) ~= place then
    leave_place(K, worker) -- the same name, started again elsewhere
  end
  local held = read_packed(K.places, place)
  if held and held.token == token then
    return held.generation
  end
  local is_other = held and held.worker ~= worker
  if held and generation > 0 and (held.generation > generation or (held.generation == generation and is_other)) then
    return 0
  end
  if generation == 0 then
    generation = (held and held.generation or 0) + 1
  end
  if is_other then
    local current = redis.call("HGET", K.lease_tokens, held.worker)
    if not current or current == held.token then
      forget(K, "worker", held.worker)
    end
  end
  write_packed(K.places, place, {generation = generation, worker = worker, token = token})
  redis.call("HSET", K.placed, worker, place)
  return generation
end

-- worker, fresh token; and where it has a place, that, and its generation (0: it comes for the first time): whoever held
-- the name, or the place, before is fenced -> the generation from now on, 0 where another has the place, 1 without a place
register("join", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  local worker, token, place = args[1], args[2], args[3]
  local generation = place and take_place(K, place, worker, token, tonumber(args[4])) or 1
  if generation == 0 then
    redis.call("HDEL", K.placed, worker)
  end
  if redis.call("HGET", K.lease_tokens, worker) ~= token then
    redis.call("HSET", K.lease_tokens, worker, token)
    redis.call("HSET", K.lease_beats, worker, 0)
  end
  give_sign(K, "worker", worker)
  return generation
end)

register("beat", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.lease_tokens, args[1]) ~= args[2] then
    return refuse("FENCED", "beat of worker " .. args[1])
  end
  give_sign(K, "worker", args[1])
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
  if args[3] == "" then
    leave_place(K, args[1])
  end
  if redis.call("HEXISTS", K.workers, args[1]) == 0 then
    redis.call("ZREM", K.worker_signs, args[1])
  end
  return 1
end)

-- nonce -> the nonce of the rebuild that is under way
register("begin_rebuild", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  redis.call("HSETNX", K.rebuild, "begun", args[1])
  return redis.call("HGET", K.rebuild, "begun")
end)

-- nonce that was told at the begin -> 1, or 0 when the server was wiped again meanwhile
register("finish_rebuild", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  if redis.call("HGET", K.rebuild, "begun") ~= args[1] then
    return 0
  end
  redis.call("HSET", K.rebuild, "done", 1)
  return 1
end)

-- name, bytes to be the secret of this name from now on, if it has none -> the secret
register("secret", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  redis.call("HSETNX", K.secrets, args[1], args[2])
  return redis.call("HGET", K.secrets, args[1])
end)
