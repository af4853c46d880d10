-- One exchange of a router with the store; see replicas.py.
local rows, me, seq = KEYS[1], ARGV[1], tonumber(ARGV[2])
local lease, settling = tonumber(ARGV[3]), tonumber(ARGV[4])
local told = cjson.decode(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local born = tonumber(redis.call('HGET', rows, ' born'))
if not born then
  born = now
  redis.call('HSET', rows, ' born', now)
end
local others, before, all = {}, {}, redis.call('HGETALL', rows)
for i = 1, #all, 2 do
  if all[i] == me then
    local row = cjson.decode(all[i + 1])
    if row.seq >= seq then return {} end
    before = row.spent
  elseif all[i] ~= ' born' then
    local row = cjson.decode(all[i + 1])
    if row.till < now then
      redis.call('HDEL', rows, all[i])
    else
      others[#others + 1] = row
    end
  end
end
local row, answer = {seq = seq, till = now + lease, held = {}, uses = {}, spent = {}}, {#others + 1}
for _, each in ipairs(told.leases) do
  local name, pool, keep, need, runs, spare = unpack(each)
  local held, needed, running, sharing = keep, need, 0, {}
  for _, other in ipairs(others) do
    local his = other.held[name]
    if his then
      held, needed, running = held + his[1], needed + his[2], running + his[3]
      sharing[#sharing + 1] = his
    end
  end
  local many = #sharing + 1
  local function target(wants)
    if needed <= pool then return wants + math.floor((pool - needed) * spare / many) end
    return math.max(1, math.floor(pool * wants / needed))
  end
  local lacking = 0
  for _, his in ipairs(sharing) do
    local lacks = target(his[2]) - his[1]
    if lacks > 1 + pool / 16 or his[1] < math.min(math.max(1, his[2]), target(his[2])) then
      lacking = lacking + math.max(0, lacks)
    end
  end
  local mine, free, grant = target(need), pool - held, keep
  if now >= born + settling and free > 0 then
    local most = math.max(math.min(free, mine - keep), math.min(free - lacking, need - keep))
    grant = keep + math.max(0, most)
  end
  local give = math.max(0, math.min(grant - mine, lacking - free))
  row.held[name] = {grant, need, runs}
  answer[#answer + 1] = grant
  answer[#answer + 1] = give
  answer[#answer + 1] = running
end
for number, each in ipairs(told.buckets) do
  local name, rate, most, spent, wanted, active, told = unpack(each)
  local key, level = KEYS[number + 1], most
  row.spent[name] = told + spent
  if before[name] then spent = told + spent - before[name] end
  local seen = redis.call('GET', key)
  if seen then
    local last, at = string.match(seen, '(%S+) (%S+)')
    level = math.min(most, tonumber(last) + math.max(0, now - at) * rate)
  end
  level = math.min(most, level - spent)
  if level < most then
    redis.call('SET', key, string.format('%.6f %.0f', level, now), 'PX', math.ceil((most - level) / rate) + 1)
  elseif seen then
    redis.call('DEL', key)
  end
  local many, free = 1, level
  for _, other in ipairs(others) do
    if other.uses[name] then many, free = many + 1, free - other.uses[name] end
  end
  local part = math.min(level, math.max(0, math.min(free, math.max(level / many, wanted))))
  if active then row.uses[name] = math.max(0, part) end
  answer[#answer + 1] = string.format('%.6f', part)
  answer[#answer + 1] = string.format('%.6f', level)
  answer[#answer + 1] = many
end
redis.call('HSET', rows, me, cjson.encode(row))
redis.call('PEXPIRE', rows, 600000)
return answer
