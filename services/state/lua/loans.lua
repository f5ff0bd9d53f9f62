-- Episodes that agents fetch by themselves: offered by the worker that holds them, lent to one agent at a time, kept by
-- that agent's signs of life, and ended by it. The worker watches the signs with a clock of its own; here is none. What
-- was lent once in an attempt is not offered again in it, so the next agent has a key of its own.

local LENT, FINISHED = "lent", "finished"

-- worker token, episode, attempt, what an agent is to be told, the least and the most that its end may be worth (absent
-- or "": any) -> 1, or 0 where it was offered before
register("offer", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, episode, attempt = args[1], args[2], tonumber(args[3])
  local state = read_episode(K, episode)
  if not state or token == "" or state.token ~= token or state.done or attempt ~= state.attempt then
    return fence(state, "offer of episode " .. episode)
  end
  if redis.call("HEXISTS", K.offers, episode) == 1 then
    return 0
  end
  write_record(K.offers, episode, {
    attempt = attempt, loan = "", data = args[4], least = args[5] or "", most = args[6] or ""
  })
  redis.call("ZADD", K.offered, state.sequence, episode)
  return 1
end)

local function loan_row(id, loan)
  return {id, loan.episode, loan.attempt, loan.beats, tostring(loan.length_s), loan.state, loan.reward,
    loan.till, loan.refused or 0}
end

-- What stands in the way of this reward, nil where nothing does.
local function range_left(K, loan, reward)
  local packed = redis.call("HGET", K.offers, loan.episode)
  local offer, value = packed and unpacked(packed) or {}, tonumber(reward)
  local least, most = tonumber(offer.least or ""), tonumber(offer.most or "")
  if value and ((least and value < least) or (most and value > most)) then
    return "(" .. (least and offer.least or "-inf") .. ", " .. (most and offer.most or "inf") .. ")"
  end
end

-- id of the loan, seconds between two signs of life at most, the time of day that it lasts till (for people; nothing here
-- reads it) -> its row and what the agent is to be told, or nil where
-- nothing waits. An id that was given before names the same loan.
register("lend", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local id, length_s = args[1], args[2]
  local packed = redis.call("HGET", K.loans, id)
  local loan = packed and unpacked(packed)
  local is_again = loan and 1 or 0
  while not loan do
    local episode = redis.call("ZPOPMIN", K.offered)[1]
    if not episode then
      return nil
    end
    local held = redis.call("HGET", K.offers, episode)
    local offer, state = held and unpacked(held), read_episode(K, episode)
    if offer and state and not state.done and state.attempt == offer.attempt then
      offer.loan = id
      write_record(K.offers, episode, offer)
      loan = {episode = episode, attempt = offer.attempt, beats = 0, length_s = length_s, state = LENT, reward = "",
        till = args[3]}
      write_record(K.loans, id, loan)
    end
  end
  local offer = unpacked(redis.call("HGET", K.offers, loan.episode) or "")
  return {loan_row(id, loan), offer and offer.data or "", is_again}
end)

local function read_loan(K, id)
  local packed = redis.call("HGET", K.loans, id)
  return packed and unpacked(packed)
end

-- id, seconds ("" for as many as before), the time of day: a sign of life -> its row
register("extend_loan", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local loan = read_loan(K, args[1])
  if not loan or loan.state ~= LENT then
    return refuse("FENCED", "loan " .. args[1])
  end
  loan.beats, loan.length_s = loan.beats + 1, args[2] ~= "" and args[2] or loan.length_s
  loan.till = args[3]
  write_record(K.loans, args[1], loan)
  return loan_row(args[1], loan)
end)

-- id, "finished" or "released", reward as JSON ("" for none) -> its row. The same end again changes nothing. A reward
-- that may not be is counted, and ends nothing.
register("end_loan", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local loan = read_loan(K, args[1])
  if not loan or (loan.state ~= LENT and (loan.state ~= args[2] or loan.reward ~= args[3])) then
    return refuse("FENCED", "loan " .. args[1])
  end
  local range = loan.state == LENT and range_left(K, loan, args[3])
  if range then
    loan.refused = (loan.refused or 0) + 1
    write_record(K.loans, args[1], loan)
    return refuse("RANGE", range)
  end
  loan.state, loan.reward = args[2], args[3]
  write_record(K.loans, args[1], loan)
  return loan_row(args[1], loan)
end)

-- worker token, id, signs of life that were seen -> 1, or 0 where there was another one meanwhile
register("expire_loan", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local loan = read_loan(K, args[2])
  local state = loan and read_episode(K, loan.episode)
  if not state or state.token ~= args[1] or loan.state ~= LENT or loan.beats ~= tonumber(args[3]) then
    return 0
  end
  loan.state = "expired"
  write_record(K.loans, args[2], loan)
  return 1
end)

-- -> the episodes that are offered, lent or not; rows of all loans
register("loans", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local rows, all = {}, redis.call("HGETALL", K.loans)
  for position = 1, #all, 2 do
    local loan = unpacked(all[position + 1])
    if loan then
      rows[#rows + 1] = loan_row(all[position], loan)
    end
  end
  return {redis.call("HKEYS", K.offers), rows}
end)
