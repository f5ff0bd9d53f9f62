-- One job's record, its trainer's lease, events, versions, metrics. Which transitions are legal is not known here: the
-- caller passes the states from which the new one may be entered (services/jobs.py), and the comparison is made here.

-- Trimming in strides keeps its cost per event small.
local EVENTS_KEPT, EVENTS_STRIDE = 10000, 500
local METRIC_STEPS_KEPT = 20000

local function trim_events(K, keep)
  local excess = redis.call("XLEN", K.events) - keep
  while excess > 0 do
    local entries = redis.call("XRANGE", K.events, "-", "+", "COUNT", math.min(excess, CHUNK))
    local ids, nonces = {}, {}
    for _, entry in ipairs(entries) do
      ids[#ids + 1] = entry[1]
      nonces[#nonces + 1] = entry[2][6]
    end
    redis.call("XDEL", K.events, unpack(ids))
    redis.call("HDEL", K.event_nonces, unpack(nonces))
    redis.call("HSET", K.event_log, "last_removed", ids[#ids])
    excess = excess - #ids
  end
end

-- The nonce is "" where the calling function is idempotent by itself.
local function emit(K, nonce, kind, data)
  local id = redis.call("XADD", K.events, "*", "type", kind, "data", data, "nonce", nonce)
  if nonce ~= "" then
    redis.call("HSET", K.event_nonces, nonce, id)
  end
  if redis.call("XLEN", K.events) >= EVENTS_KEPT + EVENTS_STRIDE then
    trim_events(K, EVENTS_KEPT)
  end
  return id
end

local function emit_status(K, previous)
  local job = {}
  local fields = {"status", "desired_state", "attempt", "reason_code", "reason_message", "reason_since"}
  for position, value in ipairs(redis.call("HMGET", K.job, unpack(fields))) do
    job[fields[position]] = value or nil
  end
  local reason = cjson.null
  if job.reason_code then
    reason = {code = job.reason_code, message = job.reason_message, since = job.reason_since}
  end
  emit(K, "", "job.status", cjson.encode({
    status = job.status, previous = previous or cjson.null, desired_state = job.desired_state,
    attempt = tonumber(job.attempt), status_reason = reason
  }))
end

local function set_reason(K, code, message, now)
  if code == "" then
    redis.call("HDEL", K.job, "reason_code", "reason_message", "reason_since")
    return
  end
  if redis.call("HGET", K.job, "reason_code") ~= code then
    redis.call("HSET", K.job, "reason_since", now)
  end
  redis.call("HSET", K.job, "reason_code", code, "reason_message", message)
end

local function enter(K, current, status, now, code, message)
  redis.call("HSET", K.job, "status", status)
  if status == "running" then
    redis.call("HSETNX", K.job, "started_at", now)
  end
  set_reason(K, code, message, now)
  emit_status(K, current)
end

local function contains(values, wanted, first)
  for position = first, #values do
    if values[position] == wanted then
      return true
    end
  end
  return false
end

-- specification, its digest, now, reason code and message -> 1, or 0 when the same job exists
register("create", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local digest = redis.call("HGET", K.job, "digest")
  if digest then
    if digest ~= args[2] then
      return refuse("CONFLICT", "another body")
    end
    return 0
  end
  redis.call("HSET", K.job, "spec", args[1], "digest", args[2], "status", "queued", "desired_state", "running",
    "attempt", 0, "epoch", 0, "step", 0, "created_at", args[3])
  set_reason(K, args[4], args[5], args[3])
  emit_status(K, nil)
  return 1
end)

-- status, trainer token or "", now, given code ("" for none), its message, code and message on entering without a
-- given one, "1" if terminal, the states it may be entered from -> 1, or 0 when the job was there already
register("set_status", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local status, token, now, code, message, terminal = args[1], args[2], args[3], args[4], args[5], args[8] == "1"
  local current = redis.call("HGET", K.job, "status")
  if not current then
    return refuse("MISSING", "job")
  end
  if token ~= "" and not owns(K, token) then
    return refuse("FENCED", "status " .. status)
  end
  if current == status then
    local known, said = unpack(redis.call("HMGET", K.job, "reason_code", "reason_message"))
    if code ~= "" and (known ~= code or said ~= message) then
      set_reason(K, code, message, now)
      emit_status(K, current)
    end
    return 0
  end
  if not contains(args, current, 9) then
    return refuse("FORBIDDEN", current)
  end
  if terminal then
    redis.call("HSET", K.job, "finished_at", now)
    if token == "" then
      redis.call("HSET", K.trainer, "token", "")
    end
  end
  if code == "" then
    code, message = args[6], args[7]
  end
  enter(K, current, status, now, code, message)
  return 1
end)

-- desired state, now, code and message for a job that is cancelled before any trainer has it, terminal states
register("set_desired_state", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local desired, now = args[1], args[2]
  local current, before = unpack(redis.call("HMGET", K.job, "status", "desired_state"))
  if not current then
    return refuse("MISSING", "job")
  end
  if before == desired and (desired == "cancelled" or not contains(args, current, 5)) then
    return 0
  end
  if before == "cancelled" or contains(args, current, 5) then
    return refuse("FORBIDDEN", current)
  end
  redis.call("HSET", K.job, "desired_state", desired)
  if desired == "cancelled" and current == "queued" then
    redis.call("HSET", K.job, "finished_at", now)
    enter(K, current, "cancelled", now, args[3], args[4])
  else
    emit_status(K, current)
  end
  return 1
end)

-- token, trainer, token and beat that the caller saw stand still, now, reason code and message, the states from which
-- "starting" may be entered -> {epoch, attempt}, or nil when it is not to be had
register("claim", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local token, trainer, seen_token, seen_beat, now = args[1], args[2], args[3], args[4], args[5]
  local status, desired = unpack(redis.call("HMGET", K.job, "status", "desired_state"))
  local owner, beat = unpack(redis.call("HMGET", K.trainer, "token", "beat"))
  if not status then
    return refuse("MISSING", "job")
  end
  if owner == token then
    return redis.call("HMGET", K.job, "epoch", "attempt")
  end
  local free = not owner or owner == ""
  local standing = owner == seen_token and beat == seen_beat
  local idle = desired == "paused" and (status == "queued" or status == "paused")
  if redis.call("HEXISTS", K.job, "finished_at") == 1 or idle or not (free or standing) then
    return false
  end
  redis.call("HSET", K.trainer, "token", token, "trainer", trainer, "beat", 0)
  local epoch = redis.call("HINCRBY", K.job, "epoch", 1)
  local attempt = redis.call("HINCRBY", K.job, "attempt", 1)
  if contains(args, status, 8) then
    enter(K, status, "starting", now, args[6], args[7])
  else
    emit_status(K, status)
  end
  return {tostring(epoch), tostring(attempt)}
end)

register("beat_trainer", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "beat of the trainer")
  end
  return redis.call("HINCRBY", K.trainer, "beat", 1)
end)

-- token, now, reason code and message for a job that goes back to the queue, the states from which it may
register("release", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local owner = redis.call("HGET", K.trainer, "token")
  if not owner or owner == "" then
    return 0
  end
  if owner ~= args[1] then
    return refuse("FENCED", "release of the job")
  end
  redis.call("HSET", K.trainer, "token", "")
  local status = redis.call("HGET", K.job, "status")
  if contains(args, status, 5) then
    enter(K, status, "queued", args[2], args[3], args[4])
  end
  return 1
end)

register("raise_epoch", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "epoch " .. args[2])
  end
  if tonumber(args[2]) > number_of(K.job, "epoch") then
    redis.call("HSET", K.job, "epoch", args[2])
  end
  return redis.call("HGET", K.job, "epoch")
end)

-- token, step, version
register("update_progress", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "progress to step " .. args[2])
  end
  redis.call("HSET", K.job, "step", args[2], "policy_version", args[3])
  return 1
end)

-- nonce, type, data as JSON -> event id; the same nonce is the same event
register("add_event", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  return redis.call("HGET", K.event_nonces, args[1]) or emit(K, args[1], args[2], args[3])
end)

local function earlier(one, other)
  local one_ms, one_seq = string.match(one, "^(%d+)-?(%d*)$")
  local other_ms, other_seq = string.match(other, "^(%d+)-?(%d*)$")
  one_ms, other_ms = tonumber(one_ms), tonumber(other_ms)
  if one_ms ~= other_ms then
    return one_ms < other_ms
  end
  return (tonumber(one_seq) or 0) < (tonumber(other_seq) or 0)
end

-- position, count -> {last removed id if that lies behind the position, else "", entries}
register("read_events", READS, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local last_removed = redis.call("HGET", K.event_log, "last_removed")
  local gap = last_removed and earlier(args[1], last_removed) and last_removed or ""
  return {gap, redis.call("XRANGE", K.events, "(" .. args[1], "+", "COUNT", args[2])}
end)

register("trim_events", FREES, function(keys, args)
  trim_events(named(JOB_KEYS, keys), tonumber(args[1]))
  return 1
end)

-- index, description -> the description that holds
register("describe_environment", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  redis.call("HSETNX", K.environments, args[1], args[2])
  return redis.call("HGET", K.environments, args[1])
end)

-- token, least value -> a version that was never handed out
register("next_version", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "next version")
  end
  local version = math.max(number_of(K.job, "next_version"), tonumber(args[2]))
  redis.call("HSET", K.job, "next_version", version + 1)
  return version
end)

-- token, version, manifest
register("publish_version", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local token, name, manifest = args[1], args[2], args[3]
  local version = tonumber(name)
  if not owns(K, token) then
    return refuse("FENCED", "version " .. name)
  end
  local published = redis.call("HGET", K.versions, name)
  if published == manifest then
    return 0
  end
  local current = redis.call("HGET", K.job, "published_version")
  if published or (current and version < tonumber(current)) then
    return refuse("CONFLICT", "version " .. name)
  end
  redis.call("HSET", K.versions, name, manifest)
  redis.call("HSET", K.job, "published_version", name, "policy_version", name,
    "next_version", math.max(version + 1, number_of(K.job, "next_version")))
  return 1
end)

register("current_version", READS, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local version = redis.call("HGET", K.job, "published_version")
  return version and redis.call("HGET", K.versions, version)
end)

-- step, name, value, ...: values are kept as the text that the caller wrote, so none loses precision
register("add_metrics", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local values = read_packed(K.metrics, args[1]) or {}
  for position = 2, #args, 2 do
    values[args[position]] = args[position + 1]
  end
  write_packed(K.metrics, args[1], values)
  redis.call("ZADD", K.metric_steps, args[1], args[1])
  if redis.call("ZCARD", K.metric_steps) > METRIC_STEPS_KEPT then
    redis.call("HDEL", K.metrics, redis.call("ZPOPMIN", K.metric_steps)[1])
  end
  return 1
end)

-- first step -> rows {step, name, value, ...} in order
register("read_metrics", READS, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local rows = {}
  for _, step in ipairs(redis.call("ZRANGE", K.metric_steps, args[1], "+inf", "BYSCORE")) do
    local row = {step}
    for name, value in pairs(read_packed(K.metrics, step)) do
      row[#row + 1] = name
      row[#row + 1] = value
    end
    rows[#rows + 1] = row
  end
  return rows
end)
