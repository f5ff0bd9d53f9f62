-- One job's record and its trainer's lease. Which transitions are legal is not known here: the caller passes the states
-- from which the new one may be entered (services/jobs.py), and the comparison is made here.

-- Trimming in strides keeps its cost per event small.
local EVENTS_KEPT, EVENTS_STRIDE = 10000, 500

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

-- Every change of what the user is told about the job has a number; the record on disk carries it.
local function revise(K)
  redis.call("HINCRBY", K.job, "revision", 1)
end

local function enter(K, current, status, now, code, message)
  redis.call("HSET", K.job, "status", status)
  revise(K)
  if status == "running" then
    redis.call("HSETNX", K.job, "started_at", now)
  end
  set_reason(K, code, message, now)
  emit_status(K, current)
end

-- Nothing of the queue outlives its job, nor what tells calls of talk keys from those that are sent again; what was in
-- flight is accounted for.
local function finish(K, now)
  redis.call("HSET", K.job, "finished_at", now)
  local open = redis.call("HLEN", K.groups)
  if open > 0 then
    redis.call("HINCRBY", K.counters, "dropped_job_over", open)
  end
  redis.call("UNLINK", K.groups, K.queue, K.episodes, K.index, K.segments, K.ready, K.held, K.holders,
    K.snapshots, K.offers, K.offered, K.loans, K.rewards, K.reward_deadlines, K.posted, K.talk_calls)
  redis.call("HDEL", K.meta, "charged_bytes", "stored_bytes")
end

-- The last trainers that owned the job, each with what ended it; as many as are worth reading.
local ATTEMPTS_KEPT = 20

local function attempts_of(K)
  local text = redis.call("HGET", K.job, "attempts")
  return text and cjson.decode(text) or {}
end

local function end_attempt(K, now, code, message)
  local attempts = attempts_of(K)
  local last = attempts[#attempts]
  if last and not last.ended_at then
    last.ended_at, last.code, last.message = now, code, message
    last.step = number_of(K.job, "step")
    redis.call("HSET", K.job, "attempts", cjson.encode(attempts))
  end
end

local function begin_attempt(K, now, trainer, attempt, epoch)
  end_attempt(K, now, "trainer_lost", "its sign of life stood still for a whole lease")
  local attempts = attempts_of(K)
  attempts[#attempts + 1] = {attempt = attempt, epoch = epoch, trainer = trainer, began_at = now}
  if #attempts > ATTEMPTS_KEPT then
    table.remove(attempts, 1)
  end
  redis.call("HSET", K.job, "attempts", cjson.encode(attempts))
end

local function contains(values, wanted, first)
  for position = first, #values do
    if values[position] == wanted then
      return true
    end
  end
  return false
end

local function is_unowned(K)
  local owner = redis.call("HGET", K.trainer, "token")
  return not owner or owner == ""
end

-- specification, its digest, now, reason code and message -> 1, or 0 when the same job exists; missing where it is being
-- removed
register("create", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local digest, removing = unpack(redis.call("HMGET", K.job, "digest", "removing"))
  if removing then
    return refuse("MISSING", "job")
  end
  if digest then
    if digest ~= args[2] then
      return refuse("CONFLICT", "another body")
    end
    return 0
  end
  redis.call("HSET", K.job, "spec", args[1], "digest", args[2], "status", "queued", "desired_state", "running",
    "attempt", 0, "epoch", 0, "step", 0, "created_at", args[3], "owner", args[6] or "")
  revise(K)
  set_reason(K, args[4], args[5], args[3])
  emit_status(K, nil)
  return 1
end)

-- status, trainer token or "", now, given code ("" for none), its message, code and message on entering without a
-- given one, "1" if terminal, the states it may be entered from -> 1, or 0 when the job was there already
register("set_status", FREES, function(keys, args)
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
      revise(K)
      emit_status(K, current)
    end
    return 0
  end
  if not contains(args, current, 9) then
    return refuse("FORBIDDEN", current)
  end
  if code == "" then
    code, message = args[6], args[7]
  end
  if terminal then
    finish(K, now)
    end_attempt(K, now, code ~= "" and code or status, message)
    if token == "" then
      redis.call("HSET", K.trainer, "token", "")
    end
  end
  enter(K, current, status, now, code, message)
  return 1
end)

-- token, reason code, message -> 1, or 0 where the job has another reason: the same one in newer words is nothing that
-- happened, so it is no event, and no revision
register("retell", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "reason " .. args[2])
  end
  if redis.call("HGET", K.job, "reason_code") ~= args[2] then
    return 0
  end
  redis.call("HSET", K.job, "reason_message", args[3])
  return 1
end)

-- now, reason code and message -> 1, or 0 where a trainer has the job or it is over: what another process says of a job
-- that nobody trains
register("explain_unowned", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local status, known, said = unpack(redis.call("HMGET", K.job, "status", "reason_code", "reason_message"))
  if not status then
    return refuse("MISSING", "job")
  end
  if redis.call("HEXISTS", K.job, "finished_at") == 1 or not is_unowned(K) then
    return 0
  end
  if known ~= args[2] or said ~= args[3] then
    set_reason(K, args[2], args[3], args[1])
    revise(K)
    emit_status(K, status)
  end
  return 1
end)

-- desired state, now, code and message for a job that is cancelled while no trainer has it, how it is to be cancelled
-- ("" for another wish), terminal states. What only a trainer can do (drain, save) waits for one, once the job has begun.
register("set_desired_state", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local desired, now, manner = args[1], args[2], args[5]
  local current, before, known_manner = unpack(redis.call("HMGET", K.job, "status", "desired_state", "cancel_manner"))
  if not current then
    return refuse("MISSING", "job")
  end
  local is_over = contains(args, current, 6)
  local has_begun = number_of(K.job, "step") > 0 or redis.call("HLEN", K.groups) > 0
  local waits_for_nobody = current == "queued" and (manner == "now" or not has_begun) or manner == "now" and is_unowned(K)
  local ends_at_once = desired == "cancelled" and not is_over and waits_for_nobody
  if not ends_at_once and before == desired and (is_over and desired == "cancelled" or not is_over and (known_manner or "") == manner) then
    return 0
  end
  if is_over or before == "cancelled" and desired ~= "cancelled" then
    return refuse("FORBIDDEN", current)
  end
  redis.call("HSET", K.job, "desired_state", desired)
  if manner ~= "" then
    redis.call("HSET", K.job, "cancel_manner", manner)
  end
  if ends_at_once then
    finish(K, now)
    enter(K, current, "cancelled", now, args[3], args[4])
  else
    revise(K)
    emit_status(K, current)
  end
  return 1
end)

-- version of the settings that the caller has seen, all live settings as JSON, what changes as JSON, terminal states
-- -> the version that holds now; said again it is the same one
register("change_settings", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local current, held = unpack(redis.call("HMGET", K.job, "status", "settings"))
  if not current then
    return refuse("MISSING", "job")
  end
  local version = number_of(K.job, "settings_version")
  if version == tonumber(args[1]) + 1 and held == args[2] then
    return version
  end
  if contains(args, current, 4) then
    return refuse("FORBIDDEN", current)
  end
  if version ~= tonumber(args[1]) then
    return refuse("CONFLICT", "settings of version " .. version)
  end
  redis.call("HSET", K.job, "settings_version", version + 1, "settings", args[2])
  revise(K)
  local changes = '{"version":' .. (version + 1) .. ',"changes":' .. args[3] .. '}'
  emit(K, "", "settings.changed", changes)
  return version + 1
end)

-- now, reason code and message, the lowest epoch that it goes on with, the step that it goes on from ("" for where it
-- ended), the version of the settings that the caller has seen, all live settings as JSON, where an epoch without a
-- trainer forks off ("" for none), terminal states -> 1
register("reopen", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local now, step = args[1], args[5]
  local status, held, removing = unpack(redis.call("HMGET", K.job, "status", "settings", "removing"))
  if not status or removing then
    return refuse("MISSING", "job")
  end
  if not contains(args, status, 9) then
    return refuse("FORBIDDEN", status)
  end
  local version = number_of(K.job, "settings_version")
  if version ~= tonumber(args[6]) then
    return refuse("CONFLICT", "settings of version " .. version)
  end
  if args[7] ~= (held or "{}") then
    redis.call("HSET", K.job, "settings_version", version + 1, "settings", args[7])
  end
  redis.call("HDEL", K.job, "finished_at", "cancel_manner", "furthest_step")
  redis.call("HSET", K.job, "desired_state", "running", "barren_attempts", 0,
    "epoch", math.max(number_of(K.job, "epoch"), tonumber(args[4])))
  if step ~= "" then
    redis.call("HSET", K.job, "step", step, "went_back", args[8])
  end
  redis.call("HSET", K.trainer, "token", "")
  enter(K, status, "queued", now, args[2], args[3])
  return 1
end)

-- A job whose attempts ended again and again without a new step ends with that, and with what ended the last one.
local function give_up(K, status, now, attempts)
  finish(K, now)
  end_attempt(K, now, "trainer_lost", "its sign of life stood still for a whole lease")
  redis.call("HSET", K.trainer, "token", "")
  local made = attempts_of(K)
  local last = made[#made]
  enter(K, status, "failed", now, "max_attempts_exceeded", attempts
    .. " attempts in a row ended before they made a new step"
    .. (last and last.code and "; the last one: " .. last.code .. ": " .. last.message or ""))
end

-- token, trainer, token and beat that the caller saw stand still, now, reason code and message, how many attempts in a
-- row may be without a new step, how many states follow in which an attempt counts, those, the states from which
-- "starting" may be entered -> {epoch, attempt}, or nil when it is not to be had
register("claim", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local token, trainer, seen_token, seen_beat, now = args[1], args[2], args[3], args[4], args[5]
  local max_attempts, num_counting = tonumber(args[8]), tonumber(args[9])
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
  local counts = contains({unpack(args, 10, 9 + num_counting)}, status, 1)
  if counts and number_of(K.job, "barren_attempts") >= max_attempts then
    give_up(K, status, now, max_attempts)
    return false
  end
  local epoch = redis.call("HINCRBY", K.job, "epoch", 1)
  redis.call("HSET", K.trainer, "token", token, "trainer", trainer, "beat", 0, "epoch", epoch)
  local attempt = redis.call("HINCRBY", K.job, "attempt", 1)
  begin_attempt(K, now, trainer, attempt, epoch)
  if counts then
    redis.call("HINCRBY", K.job, "barren_attempts", 1)
  end
  if contains(args, status, 10 + num_counting) then
    enter(K, status, "starting", now, args[6], args[7])
  else
    revise(K)
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

-- token, now, code and message of what ended the attempt, reason code and message for a job that goes back to the queue,
-- the states from which it may
register("release", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local owner = redis.call("HGET", K.trainer, "token")
  if not owner or owner == "" then
    return 0
  end
  if owner ~= args[1] then
    return refuse("FENCED", "release of the job")
  end
  redis.call("HSET", K.trainer, "token", "")
  -- Leaving in an orderly way is no failure.
  redis.call("HSET", K.job, "barren_attempts", 0)
  end_attempt(K, args[2], args[3], args[4])
  local status = redis.call("HGET", K.job, "status")
  if contains(args, status, 7) then
    enter(K, status, "queued", args[2], args[5], args[6])
  else
    revise(K)
  end
  return 1
end)

-- token, now, code and message of why, the states from which it may: back into the queue, behind those that wait
register("yield", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local owner = redis.call("HGET", K.trainer, "token")
  if not owner or owner == "" then
    return 0
  end
  if owner ~= args[1] then
    return refuse("FENCED", "yield of the trainer")
  end
  redis.call("HSET", K.trainer, "token", "")
  end_attempt(K, args[2], args[3], args[4])
  local status = redis.call("HGET", K.job, "status")
  if contains(args, status, 5) then
    -- The attempt does not count; those before it do.
    redis.call("HSET", K.job, "barren_attempts", math.max(0, number_of(K.job, "barren_attempts") - 1))
    redis.call("HINCRBY", K.job, "yields", 1)
    enter(K, status, "queued", args[2], args[3], args[4])
  else
    revise(K)
  end
  return 1
end)

local function disown(K, now, code, message)
  redis.call("HSET", K.trainer, "token", "")
  end_attempt(K, now, code, message)
  set_reason(K, code, message, now)
  revise(K)
  emit_status(K, redis.call("HGET", K.job, "status"))
end

-- token, now, code and message of the cause: an attempt that its own trainer ends, and that counts like a lost one
register("end_attempt", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local owner = redis.call("HGET", K.trainer, "token")
  if not owner or owner == "" then
    return 0
  end
  if owner ~= args[1] then
    return refuse("FENCED", "end of the attempt")
  end
  disown(K, args[2], args[3], args[4])
  return 1
end)

-- token and beat that the caller saw stand still, now, code and message of the cause, states in which the job's reason
-- stays -> 1, or 0 when its owner lives or is another one: an attempt whose trainer is dead, ended by another trainer
register("lose", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local owner, beat = unpack(redis.call("HMGET", K.trainer, "token", "beat"))
  -- One that woke up may have ended its job between its last beat and now.
  local is_over = redis.call("HEXISTS", K.job, "finished_at") == 1
  if is_over or not owner or owner == "" or owner ~= args[1] or beat ~= args[2] then
    return 0
  end
  -- Where nobody is waited for, what the job says of itself stays.
  if contains(args, redis.call("HGET", K.job, "status"), 6) then
    redis.call("HSET", K.trainer, "token", "")
    end_attempt(K, args[3], args[4], args[5])
    revise(K)
  else
    disown(K, args[3], args[4], args[5])
  end
  return 1
end)

-- token, the least epoch, "back" where that one goes on from an earlier step: each step after that is a new one again
register("raise_epoch", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "epoch " .. args[2])
  end
  if args[3] == "back" then
    redis.call("HDEL", K.job, "furthest_step")
  end
  if tonumber(args[2]) > number_of(K.job, "epoch") then
    redis.call("HSET", K.job, "epoch", args[2])
    revise(K)
  end
  return redis.call("HGET", K.job, "epoch")
end)

-- Whoever makes a job out of another says so before, and when it is made; one that died meanwhile counts for an hour.
local USE_S = 3600

-- name of the request, now (s): from now on the job cannot be removed
register("use_job", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local status, removing = unpack(redis.call("HMGET", K.job, "status", "removing"))
  if not status or removing then
    return refuse("MISSING", "job")
  end
  redis.call("ZADD", K.uses, args[2], args[1])
  return 1
end)

-- name of the request: the job that it made is there to be seen, or there will be none
register("end_use", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local has_ended = redis.call("ZREM", K.uses, args[1])
  if has_ended == 1 and redis.call("EXISTS", K.job) == 1 then
    redis.call("HINCRBY", K.job, "ended_uses", 1)
  end
  return has_ended
end)

-- how many uses had ended before the caller looked for jobs that were made out of this one, digest of the job's
-- idempotency key or "", now (s) -> the digest, when the job can only be removed from now on; "again" when the caller
-- has to look again
register("begin_removal", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local status, removing = unpack(redis.call("HMGET", K.job, "status", "removing"))
  if not status then
    return refuse("MISSING", "job")
  end
  if removing then
    if removing == "" and args[2] ~= "" then
      redis.call("HSET", K.job, "removing", args[2])
      return args[2]
    end
    return removing
  end
  if redis.call("HEXISTS", K.job, "finished_at") == 0 then
    return refuse("FORBIDDEN", status)
  end
  if #redis.call("ZRANGE", K.uses, tonumber(args[3]) - USE_S, "+inf", "BYSCORE") > 0 then
    return refuse("CONFLICT", "a job is being made out of it")
  end
  if number_of(K.job, "ended_uses") ~= tonumber(args[1]) then
    return "again"
  end
  redis.call("HSET", K.job, "removing", args[2])
  return args[2]
end)

-- All of a job whose removal has begun. Its record is the last to go.
register("remove_job", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if redis.call("HEXISTS", K.job, "removing") == 0 then
    return 0
  end
  for _, key in pairs(K) do
    redis.call("UNLINK", key)
  end
  redis.call("UNLINK", string.sub(K.job, 1, -1 - #"job") .. "dead_letters")
  return 1
end)

-- token, step, version
register("update_progress", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "progress to step " .. args[2])
  end
  redis.call("HSET", K.job, "step", args[2], "policy_version", args[3])
  local furthest = redis.call("HGET", K.job, "furthest_step")
  if not furthest or tonumber(args[2]) > tonumber(furthest) then
    redis.call("HSET", K.job, "furthest_step", args[2], "barren_attempts", 0, "yields", 0)
  end
  return 1
end)
