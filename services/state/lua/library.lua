-- What all functions share. The names of the keys (BUS_KEYS and so on) and VERSION, DIGEST are put before this text.
-- Rules: a function first checks everything, then writes, so a refusal never leaves half of a change;
-- repeating a call changes nothing; a token is compared for equality, never for order.

-- KEYS as a table by name. A process of an earlier release names fewer of them: the others have the same beginning and the
-- same hash tag.
local function named(names, keys)
  local by_name, beginning = {}, string.sub(keys[1], 1, -1 - #names[1])
  for position, name in ipairs(names) do
    by_name[name] = keys[position] or beginning .. name
  end
  return by_name
end

local function refuse(word, detail)
  return redis.error_reply(word .. " " .. detail)
end

local function number_of(key, field)
  return tonumber(redis.call("HGET", key, field) or 0)
end

-- nil also where it cannot be read
local function read_packed(key, field)
  local packed = redis.call("HGET", key, field)
  if not packed then
    return nil
  end
  local is_packed, value = pcall(cmsgpack.unpack, packed)
  return is_packed and type(value) == "table" and value or nil
end

local function write_packed(key, field, value)
  redis.call("HSET", key, field, cmsgpack.pack(value))
end

-- Whether the caller is the trainer that owns the job.
local function owns(K, token)
  return token ~= "" and redis.call("HGET", K.trainer, "token") == token
end

-- Lua holds at most some thousand arguments on its stack.
local CHUNK = 1000

local function in_chunks(values, act)
  for first = 1, #values, CHUNK do
    act({unpack(values, first, math.min(first + CHUNK - 1, #values))})
  end
end

-- Field, value, field, value ...; CHUNK is even.
local function write_fields(key, fields_and_values)
  in_chunks(fields_and_values, function(some)
    redis.call("HSET", key, unpack(some))
  end)
end

local function register(name, flags, callback)
  redis.register_function{function_name = "gspo_" .. name, callback = callback, flags = flags}
end

-- Reads run on replicas too. What frees memory or renews a lease must run when memory is full, and so must the little
-- that a trainer says on its way to the next commit: nobody else frees what is full.
local READS, FREES = {"no-writes"}, {"allow-oom"}

register("version", READS, function(keys, args)
  return {VERSION, DIGEST}
end)
