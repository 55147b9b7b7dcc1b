-- Random requests for wrk, the same sequence for every server (the seed is the thread's number).
--
--   wrk ... URL -- block PREFIX COUNT          GET PREFIX<index>
--   wrk ... URL -- range PATH BYTES COUNT      GET PATH, Range: one piece of BYTES at a multiple of BYTES
--   wrk ... URL -- batch PATH ITEMS COUNT      POST PATH, ITEMS indices as JSON; bytes back
--
-- Requests are built by hand: wrk.format costs more than the server under test. Prints one JSON object at the end.

local threads = 0

function setup(thread)
  threads = threads + 1
  thread:set("number", threads)
end

local format, random, floor, concat = string.format, math.random, math.floor, table.concat

local function chosen(count)
  return floor(random() * count)
end

local builders = {
  block = function(prefix, count)
    local head, tail = "GET " .. prefix, " HTTP/1.1\r\nHost: localhost\r\n\r\n"
    count = tonumber(count)
    return function() return head .. format("%d", chosen(count)) .. tail end
  end,
  range = function(path, bytes, count)
    local head = "GET " .. path .. " HTTP/1.1\r\nHost: localhost\r\nRange: bytes="
    bytes, count = tonumber(bytes), tonumber(count)
    return function()
      local first = chosen(count) * bytes
      return head .. format("%.0f-%.0f\r\n\r\n", first, first + bytes - 1)
    end
  end,
  batch = function(path, items, count)
    local head = "POST " .. path .. " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" ..
      "Accept: application/octet-stream\r\nContent-Length: "
    items, count = tonumber(items), tonumber(count)
    local indices = {}
    return function()
      for i = 1, items do indices[i] = chosen(count) end
      local body = '{"indices":[' .. concat(indices, ",") .. "]}"
      return head .. #body .. "\r\n\r\n" .. body
    end
  end,
}

function init(arguments)
  math.randomseed(number)
  request = builders[arguments[1]](arguments[2], arguments[3], arguments[4])
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(format(
    '{"requests": %d, "bytes": %.0f, "seconds": %.6f, "p50_us": %.1f, "p99_us": %.1f, "errors": %d}\n',
    summary.requests, summary.bytes, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
