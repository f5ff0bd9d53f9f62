-- Answers to requests that name a key of their own. A field of `replies` is packed {request, owner, till, reply}: while
-- the work is under way there is no reply, and from `till` on who began it counts as gone. Times are milliseconds of the
-- callers' clocks: where these are further apart than what is left until `till`, two callers may do the same work.

local REPLIES_KEPT, REPLY_BYTES_KEPT = 20000, 64 * 1024 * 1024

local function drop_reply(K, name)
  local held = redis.call("HGET", K.replies, name)
  if held then
    redis.call("HDEL", K.replies, name)
    redis.call("HINCRBY", K.replies_held, "bytes", -#held)
  end
  redis.call("ZREM", K.replies_order, name)
end

local function put_reply(K, name, record, now)
  drop_reply(K, name)
  local packed = cmsgpack.pack(record)
  redis.call("HSET", K.replies, name, packed)
  redis.call("HINCRBY", K.replies_held, "bytes", #packed)
  redis.call("ZADD", K.replies_order, now, name)
end

local function make_room(K, too_old)
  for _, name in ipairs(redis.call("ZRANGE", K.replies_order, "-inf", too_old, "BYSCORE", "LIMIT", 0, 100)) do
    drop_reply(K, name)
  end
  while redis.call("ZCARD", K.replies_order) > REPLIES_KEPT
    or number_of(K.replies_held, "bytes") > REPLY_BYTES_KEPT do
    drop_reply(K, redis.call("ZRANGE", K.replies_order, 0, 0)[1])
  end
end

-- name, request, owner, now, till, time before which replies are forgotten -> {} when the caller is to do the work,
-- else {request that was made under this name, its reply or ""}
register("begin_reply", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  local name, request, owner, now, till = args[1], args[2], args[3], tonumber(args[4]), tonumber(args[5])
  make_room(K, tonumber(args[6]))
  local held = read_packed(K.replies, name)
  if held and (held.reply or (held.owner ~= owner and held.till > now)) then
    return {held.request, held.reply or ""}
  end
  put_reply(K, name, {request = request, owner = owner, till = till}, now)
  return {}
end)

-- name, request, owner, now, reply -> 1, or 0 when somebody else has taken the work over
register("keep_reply", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  local held = read_packed(K.replies, args[1])
  if held and held.owner ~= args[3] then
    return 0
  end
  put_reply(K, args[1], {request = args[2], owner = args[3], till = 0, reply = args[5]}, tonumber(args[4]))
  return 1
end)

-- name, owner, now, till: the work goes on
register("renew_reply", {}, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  local held = read_packed(K.replies, args[1])
  if not held or held.owner ~= args[2] or held.reply then
    return 0
  end
  held.till = tonumber(args[4])
  put_reply(K, args[1], held, tonumber(args[3]))
  return 1
end)

-- name, owner: nothing was done under this name
register("drop_reply", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  local held = read_packed(K.replies, args[1])
  if not held or held.owner ~= args[2] then
    return 0
  end
  drop_reply(K, args[1])
  return 1
end)
