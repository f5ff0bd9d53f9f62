-- What a job leaves behind while it runs: events, descriptions of environments, versions, metrics; and how all of it comes
-- back to a server that lost it.

local METRIC_STEPS_KEPT = 20000

-- The job must exist (else a worker of a wiped server would make keys for a job that nobody knows), and be the caller's
-- where it gives a token.
local function refusal_to_write(K, token, what)
  if redis.call("EXISTS", K.job) == 0 then
    return refuse("MISSING", "job")
  end
  if token ~= "" and not owns(K, token) then
    return refuse("FENCED", what)
  end
end

-- token or "", nonce, type, data as JSON -> event id; the same nonce is the same event
register("add_event", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local refusal = refusal_to_write(K, args[1], "event " .. args[3])
  if refusal then
    return refusal
  end
  return redis.call("HGET", K.event_nonces, args[2]) or emit(K, args[2], args[3], args[4])
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

-- index, description -> the description that holds: the first one, so nobody who comes late changes it
register("describe_environment", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local refusal = refusal_to_write(K, "", "")
  if refusal then
    return refusal
  end
  redis.call("HSETNX", K.environments, args[1], args[2])
  return redis.call("HGET", K.environments, args[1])
end)

-- token, least value -> a version that was never handed out
register("next_version", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "next version")
  end
  local version = math.max(number_of(K.job, "next_version"), tonumber(args[2]))
  redis.call("HSET", K.job, "next_version", version + 1)
  return version
end)

-- token, version, manifest
register("publish_version", FREES, function(keys, args)
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

local function add_metrics(K, step, args, first)
  local values = read_packed(K.metrics, step) or {}
  for position = first, #args, 2 do
    values[args[position]] = args[position + 1]
  end
  write_packed(K.metrics, step, values)
  redis.call("ZADD", K.metric_steps, step, step)
  if redis.call("ZCARD", K.metric_steps) > METRIC_STEPS_KEPT then
    redis.call("HDEL", K.metrics, redis.call("ZPOPMIN", K.metric_steps)[1])
  end
end

-- token or "", step, name, value, ...: values are kept as the text that the caller wrote, so none loses precision
register("add_metrics", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local refusal = refusal_to_write(K, args[1], "metrics of step " .. args[2])
  if refusal then
    return refusal
  end
  add_metrics(K, args[2], args, 3)
  return 1
end)

-- This step, or a later one: they come in order.
local function was_reported(K, epoch, step)
  local last_epoch, last_step = unpack(redis.call("HMGET", K.job, "reported_epoch", "reported_step"))
  if not last_epoch then
    return false
  end
  last_epoch, last_step = tonumber(last_epoch), tonumber(last_step)
  return epoch < last_epoch or epoch == last_epoch and step <= last_step
end

-- token or "", epoch, step, the event as JSON, name, value, ... -> 1, or 0 where this step or a later one was
-- reported before: numbers and event of a step that was trained come together, once
register("report_step", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local refusal = refusal_to_write(K, args[1], "report of step " .. args[3])
  if refusal then
    return refusal
  end
  if was_reported(K, tonumber(args[2]), tonumber(args[3])) then
    return 0
  end
  -- What stands there is of a history that was left: of this one a step is evaluated after its report.
  redis.call("HDEL", K.metrics, args[3])
  add_metrics(K, args[3], args, 5)
  redis.call("HSET", K.job, "reported_epoch", args[2], "reported_step", args[3])
  local nonce = "step " .. args[2] .. " " .. args[3]
  if not redis.call("HGET", K.event_nonces, nonce) then
    emit(K, nonce, "step", args[4])
  end
  return 1
end)

-- epoch, step: steps up to this one were reported before the server lost that
register("mark_reported", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local refusal = refusal_to_write(K, "", "the mark of reports")
  if refusal then
    return refusal
  end
  if not was_reported(K, tonumber(args[1]), tonumber(args[2])) then
    redis.call("HSET", K.job, "reported_epoch", args[1], "reported_step", args[2])
  end
  return 1
end)

-- first step, how many steps at most (all where a process of an earlier release does not say)
-- -> rows {step, name, value, ...} in order
register("read_metrics", READS, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local rows = {}
  for _, step in ipairs(redis.call("ZRANGE", K.metric_steps, args[1], "+inf", "BYSCORE", "LIMIT", 0, args[2] or -1)) do
    local row = {step}
    for name, value in pairs(read_packed(K.metrics, step) or {}) do
      row[#row + 1] = name
      row[#row + 1] = value
    end
    rows[#rows + 1] = row
  end
  return rows
end)

-- A server that was wiped, or that lost its newest writes, is told what the job's directory knows. It may be wiped between
-- two of these calls: only restore_job makes a record, else half a one would pass for a job that is known.

local function is_known(K)
  return redis.call("HEXISTS", K.job, "spec") == 1
end

-- revision, then fields and values of the job -> 1, or 0 when the server knows as much or more
register("restore_job", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if is_known(K) and number_of(K.job, "revision") >= tonumber(args[1]) then
    return 0
  end
  local epoch = number_of(K.job, "epoch")
  redis.call("HDEL", K.job, "reason_code", "reason_message", "reason_since", "started_at", "finished_at")
  redis.call("HSET", K.job, unpack(args, 2))
  redis.call("HSET", K.job, "revision", args[1], "barren_attempts", 0,
    "epoch", math.max(epoch, number_of(K.job, "epoch")))
  redis.call("HSETNX", K.job, "step", 0)
  local finished_at = redis.call("HGET", K.job, "finished_at")
  if finished_at then
    finish(K, finished_at)
  end
  local first = redis.call("XREVRANGE", K.events, "+", "-", "COUNT", 1)[1]
  if not first then
    -- Whoever resumes after an event of before is told that there was more.
    emit_status(K, nil)
    first = redis.call("XRANGE", K.events, "-", "+", "COUNT", 1)[1]
    local milliseconds = tonumber(string.match(first[1], "^%d+"))
    redis.call("HSET", K.event_log, "last_removed", string.format("%.0f-0", milliseconds - 1))
  end
  return 1
end)

-- the highest revision on disk: the present state is the next one, if it is not known to be newer
register("pass_revision", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if is_known(K) and number_of(K.job, "revision") <= tonumber(args[1]) then
    redis.call("HSET", K.job, "revision", args[1] + 1)
  end
  return 1
end)

-- version, its step, manifest, version, its step, manifest, ... in order
register("restore_versions", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not is_known(K) then
    return 0
  end
  local highest = tonumber(redis.call("HGET", K.job, "published_version") or -1)
  for position = 1, #args, 3 do
    local version, step = args[position], args[position + 1]
    redis.call("HSETNX", K.versions, version, args[position + 2])
    if tonumber(version) > highest then
      highest = tonumber(version)
      redis.call("HSET", K.job, "published_version", version, "policy_version", version, "step", step)
    end
  end
  redis.call("HSET", K.job, "next_version", math.max(highest + 1, number_of(K.job, "next_version")))
  return 1
end)
