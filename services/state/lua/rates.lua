-- How often one caller may ask all API processes together: a bucket of requests for each, filled by the callers' clocks.
-- A clock that is far ahead of the next caller's counts as that one's: it must not stop the filling for others.

local MAX_SKEW_MS = 2000

-- caller, now (ms), requests a second, size of the bucket, requests wanted -> requests granted, or 0 and the
-- milliseconds until there is one
register("take_requests", FREES, function(keys, args)
  local K = named(SERVICE_KEYS, keys)
  local name, now, per_s, burst, wanted = args[1], tonumber(args[2]), tonumber(args[3]), tonumber(args[4]),
    tonumber(args[5])
  local held = read_packed(K.rates, name) or {level = burst, at = now}
  local at = held.at <= now + MAX_SKEW_MS and held.at or now
  local level = math.min(burst, held.level + math.max(0, now - at) * per_s / 1000)
  local granted = math.min(wanted, math.floor(level))
  write_packed(K.rates, name, {level = level - granted, at = math.max(at, now)})
  return {granted, granted > 0 and 0 or math.ceil((1 - level) * 1000 / per_s)}
end)
