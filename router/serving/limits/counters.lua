-- The limits of one tenant, counted for all gateways. Each call is atomic.
--
-- KEYS[1]  leases: hold -> when it may be forgotten, ms
-- KEYS[2]  holds: hold -> what it has reserved, "counter amount counter amount …"; "" once it is settled
-- ARGV[1]  what to do; ARGV[2]  how the names of counters begin, with the same hash tag as KEYS
--
-- A counter is LIMIT:FIRST_SECOND_OF_WINDOW. Amounts stay text on their way into it: INCRBY is exact in 64 bits, a
-- number of Lua only in 53.

local KEPT_MS = 120000 -- a settled hold is remembered so long: whatever is said twice of it, or too late, does nothing
local QUIET_S = 45 * 86400 -- then a tenant's keys go, if nobody asked for them
local AFTER_S = 86400 -- so long after its window a counter can still be settled
local SWEPT = 200

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local leases, holds, what, prefix = KEYS[1], KEYS[2], ARGV[1], ARGV[2]

local function give_back(record)
  for counter, amount in string.gmatch(record, '(%S+) (%S+)') do
    local key = prefix .. counter
    if redis.call('EXISTS', key) == 1 and redis.call('DECRBY', key, amount) <= 0 then
      redis.call('DEL', key)
    end
  end
end

local function add(counter, amount, ends)
  local key = prefix .. counter
  local used = redis.call('INCRBY', key, amount)
  local left = ends - math.floor(now / 1000)
  redis.call('EXPIRE', key, ends == 0 and QUIET_S or math.max(left, 0) + AFTER_S)
  return used
end

local function keep(hold, record, until_ms)
  redis.call('HSET', holds, hold, record)
  redis.call('ZADD', leases, until_ms, hold)
  redis.call('EXPIRE', leases, QUIET_S)
  redis.call('EXPIRE', holds, QUIET_S)
end

local function sweep()
  local over = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, SWEPT)
  for _, hold in ipairs(over) do
    give_back(redis.call('HGET', holds, hold) or '')
    redis.call('HDEL', holds, hold)
    redis.call('ZREM', leases, hold)
  end
end

-- length in seconds, how far ahead of UTC; or, where the length is 0, when windows begin: "a b c d", "" for none
local function window(length, shift, begins)
  local second = math.floor(now / 1000)
  if length > 0 then
    local first = second - (second + shift) % length
    return first, first + length
  end
  local first, after = 0, 0
  for begin in string.gmatch(begins, '%S+') do
    first, after = after, tonumber(begin)
    if second < after and first > 0 then
      break
    end
  end
  return first, after
end

-- hold, lease in ms, then of each limit: id, wanted, amount, length, shift, begins
-- -> taken? (1, 0, or -1: it is settled already), ms, then of each limit: first second, end, used
local function take()
  sweep()
  local hold, lease = ARGV[3], tonumber(ARGV[4])
  local record = redis.call('HGET', holds, hold)
  if record == '' then
    return '-1 ' .. string.format('%.0f', now)
  end
  record = record or ''
  local fits, said, taken = true, {}, {}
  for i = 5, #ARGV, 6 do
    local first, ends = window(tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]), ARGV[i + 5])
    local counter = ARGV[i] .. ':' .. string.format('%.0f', first)
    local used = tonumber(redis.call('GET', prefix .. counter) or '0')
    fits = fits and used + tonumber(ARGV[i + 1]) <= tonumber(ARGV[i + 2])
    taken[#taken + 1] = { counter, ARGV[i + 1], ends }
    said[#said + 1] = string.format('%.0f %.0f %.0f', first, ends, used)
  end
  if fits then
    for number, each in ipairs(taken) do
      local used = add(each[1], each[2], each[3])
      record = record .. each[1] .. ' ' .. each[2] .. ' '
      said[number] = string.gsub(said[number], '%S+$', string.format('%.0f', used))
    end
    keep(hold, record, now + lease)
  end
  return (fits and '1 ' or '0 ') .. string.format('%.0f ', now) .. table.concat(said, ' ')
end

-- hold, then of each counter: its name, what was really used, when its window ends
local function settle()
  local hold = ARGV[3]
  local record = redis.call('HGET', holds, hold)
  if record == '' then
    return '0'
  end
  give_back(record or '')
  for i = 4, #ARGV, 3 do
    add(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]))
  end
  keep(hold, '', now + KEPT_MS)
  sweep()
  return '1'
end

-- lease in ms, then holds that go on -> how many holds there are, settled ones too
local function renew()
  local until_ms = now + tonumber(ARGV[3])
  for i = 4, #ARGV do
    if (redis.call('HGET', holds, ARGV[i]) or '') ~= '' then
      redis.call('ZADD', leases, 'XX', until_ms, ARGV[i])
    end
  end
  sweep()
  return tostring(redis.call('ZCARD', leases))
end

-- KEYS[1]: gateway -> when it was last heard; the gateway, how long one counts as alive, ms -> the names of those alive
local function beat()
  redis.call('ZADD', leases, now, ARGV[2])
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', now - tonumber(ARGV[3]))
  redis.call('PEXPIRE', leases, ARGV[3])
  return table.concat(redis.call('ZRANGE', leases, 0, -1), ' ')
end

if what == 'take' then
  return take()
elseif what == 'settle' then
  return settle()
elseif what == 'renew' then
  return renew()
end
return beat()
