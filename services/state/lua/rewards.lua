-- Episodes that have ended and wait for their reward. Such an episode is held by nobody and in no queue; its state has
-- `waits`, the bytes that are kept of it, and K.rewards has the rest: the attempt, the worker's token that set it aside
-- (`by`, to know a resend), the last segment as it is if no reward comes, what the gateway needs to make the one with a
-- reward, and the rewards of turns that came meanwhile. Whoever ends it, once, appends one of the two segments.

-- Tokens of rewards that were taken, so that one that is sent again is known even when its group is gone.
local REWARD_TOKENS_KEPT = 65536

-- How many kinds of what a token said the low part of a score can tell apart.
local SAYINGS = 2 ^ 20

-- Scores of rewards that came while their episode was played are so much lower, so that these are forgotten first: late
-- ones are known by nothing else while their episode waits.
local EARLIER = 2 ^ 31

local function posted_name(episode, attempt, token)
  return episode .. "/" .. attempt .. "/" .. token
end

-- One in a million of those that differ is taken for the same.
local function saying(said)
  return tonumber(string.sub(redis.sha1hex(said), 1, 5), 16)
end

-- An earlier release does not tell what was said.
local function remember_posted(K, episode, attempt, token, said, was_late)
  if token ~= "" then
    local place = redis.call("HINCRBY", K.meta, "posted", 1) - (was_late and 0 or EARLIER)
    local score = place * SAYINGS + (said and saying(said) or 0)
    redis.call("ZADD", K.posted, score, posted_name(episode, attempt, said and redis.sha1hex(token) or token))
    if redis.call("ZCARD", K.posted) > REWARD_TOKENS_KEPT then
      redis.call("ZPOPMIN", K.posted)
    end
  end
end

-- "again" if this was said with this token before, "conflict" if something else was, nil if nothing was.
local function was_posted(K, episode, attempt, token, said)
  if token == "" then
    return nil
  elseif redis.call("ZSCORE", K.posted, posted_name(episode, attempt, token)) then
    return "again"
  end
  local score = redis.call("ZSCORE", K.posted, posted_name(episode, attempt, redis.sha1hex(token)))
  if not score then
    return nil
  end
  return (not said or tonumber(score) % SAYINGS == saying(said)) and "again" or "conflict"
end

local function read_waiting(K, episode)
  local packed = redis.call("HGET", K.rewards, episode)
  local waiting = packed and unpacked(packed)
  if packed and not (waiting and type(waiting.payload) == "string" and type(waiting.posted) == "table") then
    damaged(K, "waiting reward of episode " .. episode)
  end
  return waiting
end

local function write_waiting(K, episode, state, waiting)
  write_record(K.rewards, episode, waiting)
  state.waits = #waiting.payload + #waiting.kept
  for _, item in ipairs(waiting.posted) do
    state.waits = state.waits + #item
  end
end

-- The episode ends with this segment.
local function end_waiting(K, episode, state, payload, digest)
  local charged, stored = charge(state), stored_bytes(state)
  stop_waiting(K, episode, state)
  store_segments(K, {
    {episode = episode, index = state.segments, attempt = state.attempt, payload = payload, digest = digest}
  })
  state.segments, state.bytes, state.done = state.segments + 1, state.bytes + #payload, true
  write_record(K.episodes, episode, state)
  account(K, charge(state) - charged, stored_bytes(state) - stored)
  local name = string.match(episode, "^(%d+):")
  local group = read_group(K, name)
  group.waited = (group.waited or 0) + 1
  write_record(K.groups, name, group)
  finish_episode(K, "", episode)
end

-- worker token, episode, attempt, index, its last segment without a reward, digest of that, what is kept for its reward,
-- deadline (Unix milliseconds), note
register("await_reward", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, episode, attempt, index, payload = args[1], args[2], tonumber(args[3]), tonumber(args[4]), args[5]
  local state = read_episode(K, episode)
  if state and state.waits and attempt == state.attempt then
    local waiting = read_waiting(K, episode)
    return waiting.by == token and 0 or refuse("FENCED", "awaiting the reward of episode " .. episode)
  end
  if not state or token == "" or state.token ~= token or state.done or attempt < state.attempt then
    return fence(state, "awaiting the reward of episode " .. episode)
  end
  if attempt > state.attempt or index ~= state.segments then
    return refuse("GAP", "the end of episode " .. episode .. " after segment " .. index .. " of attempt " .. attempt
      .. ", the server holds " .. state.segments .. " of attempt " .. state.attempt)
  end
  local charged, stored = charge(state), stored_bytes(state)
  drop_snapshot(K, episode, state)
  drop_offer(K, episode)
  redis.call("ZREM", K.held, held_name(token, episode))
  state.token = ""
  state.note = args[9] ~= "" and args[9] or state.note
  write_waiting(K, episode, state, {
    attempt = attempt, by = token, payload = payload, digest = args[6], kept = args[7], posted = {},
    deadline = tonumber(args[8])
  })
  write_record(K.episodes, episode, state)
  redis.call("ZADD", K.reward_deadlines, args[8], episode)
  account(K, charge(state) - charged, stored_bytes(state) - stored)
  forget_idle_holder(K, token)
  return 1
end)

-- Whether the queue was lost since: attempts are counted anew then, so the same number is another attempt.
local function is_of_a_lost_queue(K, episode, epoch)
  local group = read_group(K, string.match(episode, "^%d+"))
  return group and epoch and epoch < (group.epoch or 0)
end

-- What may be said of a reward for this episode; "" if it may be taken.
local function refusal_of_reward(K, episode, state, attempt, epoch, token, said, now)
  if is_of_a_lost_queue(K, episode, epoch) or (state and state.attempt > attempt) then
    return "ended"
  end
  local posted = was_posted(K, episode, attempt, token, said)
  if posted then
    return posted
  elseif not state or (state.done and state.attempt == attempt) then
    return "ended"
  elseif not state.waits or state.attempt < attempt then
    return "playing"
  end
  return now > read_waiting(K, episode).deadline and "late" or ""
end

-- episode, attempt, token, now (Unix milliseconds), epoch in which its group was dispatched, what the token says -> word,
-- and if the episode waits for it (word ""): its last segment without a reward, what was kept, and the rewards of turns
-- that came meanwhile, three items each
register("look_at_reward", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local episode, attempt = args[1], tonumber(args[2])
  local state = view_episode(K, episode)
  local word = refusal_of_reward(K, episode, state, attempt, tonumber(args[5]), args[3], args[6], tonumber(args[4]))
  if word ~= "" then
    return {word}
  end
  local waiting = read_waiting(K, episode)
  local row = {"", waiting.payload, waiting.kept}
  for _, one in ipairs(waiting.posted) do
    row[#row + 1] = one
  end
  return row
end)

-- episode, attempt, token, now, how many items of rewards the caller has seen, the last segment with the reward, its
-- digest, "end", or "turn", turn and value or two empty texts, what the token says: what a turn was paid ends nothing yet
-- -> word as above, "changed" if there are more by now, "taken" if it was taken
register("post_reward", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local episode, attempt, token, kind = args[1], tonumber(args[2]), args[3], args[8]
  local state = read_episode(K, episode)
  local word = refusal_of_reward(K, episode, state, attempt, nil, token, args[11], tonumber(args[4]))
  if word ~= "" then
    return word
  end
  local waiting = read_waiting(K, episode)
  if #waiting.posted ~= tonumber(args[5]) then
    return "changed"
  end
  remember_posted(K, episode, attempt, token, args[11], true)
  if kind == "end" then
    end_waiting(K, episode, state, args[6], args[7])
    redis.call("HINCRBY", K.meta, "late_rewards", 1)
    return "taken"
  end
  local charged, stored = charge(state), stored_bytes(state)
  waiting.payload, waiting.digest = args[6], args[7]
  for _, item in ipairs({token, args[9], args[10]}) do
    waiting.posted[#waiting.posted + 1] = item
  end
  write_waiting(K, episode, state, waiting)
  write_record(K.episodes, episode, state)
  account(K, charge(state) - charged, stored_bytes(state) - stored)
  return "taken"
end)

-- worker token, episode, attempt, then two items for each reward that it took while it was played, and is about to end
-- with: the token, and what it said. So one that is sent again after the end is known.
register("remember_rewards", {}, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local token, episode, attempt = args[1], args[2], tonumber(args[3])
  local state = read_episode(K, episode)
  if not state or token == "" or state.token ~= token or state.done or attempt < state.attempt then
    return fence(state, "remembering the rewards of episode " .. episode)
  end
  if attempt > state.attempt then
    return refuse("GAP", "rewards of attempt " .. attempt .. " of episode " .. episode .. ", the server knows "
      .. state.attempt)
  end
  for position = 4, #args, 2 do
    remember_posted(K, episode, attempt, args[position], args[position + 1], false)
  end
  return 1
end)

-- trainer token, now (Unix milliseconds), how many at most -> how many episodes ended without a reward
register("expire_rewards", FREES, function(keys, args)
  local K = named(BUS_KEYS, keys)
  if not owns(K, args[1]) then
    return refuse("FENCED", "ending the wait for rewards")
  end
  local due = redis.call("ZRANGE", K.reward_deadlines, "-inf", "(" .. args[2], "BYSCORE", "LIMIT", 0, args[3])
  for _, episode in ipairs(due) do
    local state = read_episode(K, episode)
    local waiting = state and state.waits and read_waiting(K, episode)
    if waiting then
      end_waiting(K, episode, state, waiting.payload, waiting.digest)
      redis.call("HINCRBY", K.meta, "missed_rewards", 1)
    else
      redis.call("ZREM", K.reward_deadlines, episode)
    end
  end
  return #due
end)

-- -> how many episodes wait for a reward, how many rewards came late and how many never, then the groups of which
-- nothing else is missing
register("waiting", READS, function(keys, args)
  local K = named(BUS_KEYS, keys)
  local episodes = redis.call("ZRANGE", K.reward_deadlines, 0, -1)
  local waiting, names = {}, {}
  for _, episode in ipairs(episodes) do
    local name = string.match(episode, "^(%d+):")
    if not waiting[name] then
      waiting[name], names[#names + 1] = 0, name
    end
    waiting[name] = waiting[name] + 1
  end
  local row = {#episodes, number_of(K.meta, "late_rewards"), number_of(K.meta, "missed_rewards")}
  for _, name in ipairs(names) do
    local group = read_group(K, name)
    if group and group.done + waiting[name] == group.size then
      row[#row + 1] = name
    end
  end
  return row
end)
