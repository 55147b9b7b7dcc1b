// From two answers of v1/status to a point: rates, means and percentiles of the time between them. No state, no document.

// The same interpolation as Prometheus' histogram_quantile, so that dashboards agree. null: nothing was read.
const quantile = (before, after, q) => {
  const counts = after.map((bucket, i) => bucket.count - (before[i]?.count ?? 0));
  const total = counts.at(-1) ?? 0;
  if (total <= 0) return null;
  const rank = q * total;
  const index = counts.findIndex((count) => count >= rank);
  const upper = after[index].le_us;
  if (upper === undefined) return Infinity;
  const lower = index ? after[index - 1].le_us : 0;
  const below = index ? counts[index - 1] : 0;
  const within = counts[index] - below;
  return within > 0 ? lower + (upper - lower) * ((rank - below) / within) : upper;
};

const mean = (before, after) => {
  const count = after.count - before.count;
  return count > 0 ? (after.sum - before.sum) / count : null;
};

const keyed = (list, key) => new Map(list.map((one) => [one[key], one]));
const total = (list, of) => list.reduce((sum, one) => sum + of(one), 0);

export const isRestart = (before, after) =>
  before.started_unix_ms !== after.started_unix_ms || after.uptime_ms < before.uptime_ms;

// Of the time on this page from `since` to `time`. null: too close together, or not of one process.
export const between = (before, after, since, time) => {
  const seconds = (after.uptime_ms - before.uptime_ms) / 1000;
  if (isRestart(before, after) || seconds <= 0) return null;
  const rate = (of) => (now, then) => Math.max(0, of(now) - of(then ?? now)) / seconds;
  const totals = (name) => rate((status) => status.totals[name])(after, before);
  const oldShards = keyed(before.shards, "shard");
  const oldDatasets = keyed(before.datasets, "name");
  const seen = (status) => ({
    sum: total(status.shards, (shard) => shard.depth_seen.sum),
    count: total(status.shards, (shard) => shard.depth_seen.count),
  });
  const percentile = (q) => quantile(before.read_duration.buckets, after.read_duration.buckets, q);
  return {
    since,
    time,
    reads: totals("reads_total"),
    bytes: totals("read_bytes_total"),
    errors: totals("read_errors_total"),
    rejected: totals("rejected_total"),
    depth: mean(seen(before), seen(after)),
    inFlight: total(after.shards, (shard) => shard.in_flight),
    queued: total(after.shards, (shard) => shard.queued),
    stalled: total(after.shards, (shard) => shard.stalled),
    memory: after.memory.in_use_bytes,
    p50: percentile(0.5),
    p99: percentile(0.99),
    p999: percentile(0.999),
    shards: new Map(
      after.shards.map((shard) => {
        const old = oldShards.get(shard.shard);
        return [
          shard.shard,
          {
            depth: old ? mean(old.depth_seen, shard.depth_seen) : null,
            deviceReads: rate((one) => one.device_reads_total)(shard, old),
            submissions: rate((one) => one.submissions_total)(shard, old),
          },
        ];
      }),
    ),
    datasets: new Map(
      after.datasets.map((dataset) => {
        const old = oldDatasets.get(dataset.name);
        return [
          dataset.name,
          {
            reads: rate((one) => one.reads_total)(dataset, old),
            bytes: rate((one) => one.read_bytes_total)(dataset, old),
          },
        ];
      }),
    ),
  };
};
