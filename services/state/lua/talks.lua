-- Long-lived keys that talk to a job's policy without an episode, and the traffic that they leave. A key is known by the
-- digest of its secret; what it has used is counted where it is used. Traffic is one stream for each job, in the order in
-- which it was sampled; the oldest goes first where there is more than is to be kept. Age is told by the ids of the
-- entries, all of which this server gave.

local USES = {"turns", "tokens", "ms"}

-- Calls that added to something, by the key or the trace to which they did and a token of their own: one that is sent
-- again, which is within seconds, adds nothing. Without a token ("") it is never sent again.
local TALK_CALLS_KEPT = 16384

local function was_called(K, whose, token)
  return token ~= "" and redis.call("ZSCORE", K.talk_calls, whose .. "/" .. token)
end

local function remember_call(K, whose, token)
  if token ~= "" then
    redis.call("ZADD", K.talk_calls, redis.call("HINCRBY", K.talk_used, "calls", 1), whose .. "/" .. token)
    if redis.call("ZCARD", K.talk_calls) > TALK_CALLS_KEPT then
      redis.call("ZPOPMIN", K.talk_calls)
    end
  end
end

-- id, digest, then what is to be shown of it as JSON, and the most turns, tokens and milliseconds ("" for no limit)
register("make_talk_key", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  if redis.call("EXISTS", K.job) == 0 then
    return refuse("MISSING", "job")
  end
  write_packed(K.talk_keys, args[1], {
    v = 1, digest = args[2], shown = args[3], turns = args[4], tokens = args[5], ms = args[6]
  })
  return 1
end)

local function uses_of(K, id)
  local used = {}
  for position, name in ipairs(USES) do
    used[position] = redis.call("HGET", K.talk_used, id .. ":" .. name) or "0"
  end
  return used
end

local function row_of(K, id, record)
  local used = uses_of(K, id)
  return {id, record.digest, record.shown, record.turns, record.tokens, record.ms, used[1], used[2], used[3]}
end

-- -> rows of all keys that were not revoked
register("talk_keys", READS, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local rows, all = {}, redis.call("HGETALL", K.talk_keys)
  for position = 1, #all, 2 do
    rows[#rows + 1] = row_of(K, all[position], cmsgpack.unpack(all[position + 1]))
  end
  return rows
end)

-- id -> 1, or 0 where there is no such key
register("revoke_talk_key", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  for _, name in ipairs(USES) do
    redis.call("HDEL", K.talk_used, args[1] .. ":" .. name)
  end
  return redis.call("HDEL", K.talk_keys, args[1])
end)

-- Behind the token of turns that were given back before the call that adds them came: it adds none then.
local VOID = "/void"

-- id, digest, turns to add, token of the call (may be absent) -> the row. Refused: FENCED where the key is not, or no more;
-- FULL, with the name of what it has used up, where a turn is to be added.
register("use_talk_key", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local record = read_packed(K.talk_keys, args[1])
  if not record or record.digest ~= args[2] then
    return refuse("FENCED", "key " .. args[1])
  end
  local token = args[4] or ""
  if args[3] == "0" or was_called(K, args[1], token) or was_called(K, args[1], token .. VOID) then
    return row_of(K, args[1], record)
  end
  local used = uses_of(K, args[1])
  for position, name in ipairs(USES) do
    if record[name] ~= "" and tonumber(used[position]) >= tonumber(record[name]) then
      return refuse("FULL", name)
    end
  end
  redis.call("HINCRBY", K.talk_used, args[1] .. ":turns", args[3])
  remember_call(K, args[1], token)
  return row_of(K, args[1], record)
end)

-- id, turns, token of the call that added them -> 1, or 0 where it added none so far, or they were given back
register("give_back_talk_turns", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local was_added = redis.call("ZREM", K.talk_calls, args[1] .. "/" .. args[3]) == 1
  if redis.call("HEXISTS", K.talk_keys, args[1]) == 0 then
    return 0
  elseif was_added then
    redis.call("HINCRBY", K.talk_used, args[1] .. ":turns", -args[2])
  else
    remember_call(K, args[1], args[3] .. VOID)
  end
  return was_added and 1 or 0
end)

local function drop_oldest(K, keep_bytes, until_ms, most)
  local bytes, count = number_of(K.talk_used, "bytes"), 0
  while count < most do
    local oldest = redis.call("XRANGE", K.traffic, "-", "+", "COUNT", 1)[1]
    if not oldest or (bytes <= keep_bytes and tonumber(string.match(oldest[1], "^%d+")) >= until_ms) then
      break
    end
    bytes = bytes - #oldest[2][8]
    redis.call("XDEL", K.traffic, oldest[1])
    count = count + 1
  end
  if count > 0 then
    redis.call("HSET", K.talk_used, "bytes", string.format("%.0f", math.max(bytes, 0)))
  end
  return count
end

-- most bytes and milliseconds to keep, most segments to drop -> how many were
register("drop_old_traffic", FREES, function(keys, args)
  local until_ms = tonumber(redis.call("TIME")[1]) * 1000 - tonumber(args[2])
  return drop_oldest(named(JOB_KEYS, keys), tonumber(args[1]), until_ms, tonumber(args[3]))
end)

-- key, trace or trace/index (of the first segment, the token of the call), user, tokens, milliseconds, most bytes and
-- milliseconds to keep, segments
register("record_traffic", {}, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local trace, token = string.match(args[2], "^(%d+)/?(.*)$")
  if was_called(K, trace, token) then
    return 1
  end
  if redis.call("HEXISTS", K.talk_keys, args[1]) == 0 then
    return refuse("FENCED", "key " .. args[1])
  end
  local last
  for position = 8, #args do
    last = redis.call("XADD", K.traffic, "*", "k", args[1], "t", trace, "u", args[3], "d", args[position])
    redis.call("HINCRBY", K.talk_used, "bytes", #args[position])
  end
  redis.call("HINCRBY", K.talk_used, args[1] .. ":tokens", args[4])
  redis.call("HINCRBY", K.talk_used, args[1] .. ":ms", args[5])
  remember_call(K, trace, token)
  drop_oldest(K, tonumber(args[6]), tonumber(string.match(last or "0", "^%d+")) - tonumber(args[7]), math.huge)
  return 1
end)

-- "t" (a trace), "u" (a user) or "k" (a key), its name -> how many segments were erased
register("erase_traffic", FREES, function(keys, args)
  local K = named(JOB_KEYS, keys)
  local count, after = 0, "-"
  while true do
    local some = redis.call("XRANGE", K.traffic, after, "+", "COUNT", 500)
    for _, entry in ipairs(some) do
      for position = 1, #entry[2], 2 do
        if entry[2][position] == args[1] and entry[2][position + 1] == args[2] then
          redis.call("XDEL", K.traffic, entry[1])
          redis.call("HINCRBY", K.talk_used, "bytes", -#entry[2][8])
          count = count + 1
        end
      end
    end
    if #some < 500 then
      return count
    end
    after = "(" .. some[#some][1]
  end
end)
