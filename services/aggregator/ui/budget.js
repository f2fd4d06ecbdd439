// The time budget of a step: its seconds, part by part, as they follow each other.

import { color } from "./dom.js";
import { columns } from "./series.js";

// Parts are disjoint: fwd_s is inside fwd_bwd_s, and work on other threads does not count.
export const PARTS = [
  ["perf/rollout_wait_s", "wait for rollouts"],
  ["perf/straggler_wait_s", "wait for stragglers"],
  ["perf/data_s", "data"],
  ["perf/fwd_bwd_s", "forward, backward"],
  ["perf/optimizer_s", "optimizer"],
  ["perf/weight_sync_s", "weight sync"],
  ["perf/checkpoint_s", "checkpoint"],
  ["perf/eval_s", "evaluation"],
  ["perf/unaccounted_s", "unaccounted"],
];

export const KEYS = PARTS.map(([key]) => key);

// The metric that each verdict's share is of; it gets the accent.
export const HELD = {
  "environment-bound": "perf/rollout_wait_s",
  "generation-bound": "perf/rollout_wait_s",
  "scoring-bound": "perf/rollout_wait_s",
  "pacing-bound": "perf/rollout_wait_s",
  "straggler-bound": "perf/straggler_wait_s",
  "sync-bound": "perf/weight_sync_s",
};

// Series for a chart, the top of the stack first (what is drawn later lies in front); a part that was
// never observed is left out. `held` is the key with the accent.
export function stacked(histories, held) {
  const tables = new Map(histories.map((each) => [each.key, columns(each.points, each.shift)]));
  const x = [...new Set([...tables.values()].flatMap((table) => table.x))].sort((a, b) => a - b);
  const total = new Map(x.map((each) => [each, 0]));
  const series = [];
  PARTS.forEach(([key, label], index) => {
    const table = tables.get(key);
    if (!table || !table.value.some((value) => value !== null && value !== 0)) return;
    const at = new Map(table.x.map((each, place) => [each, table.value[place]]));
    const read = x.map((each) => at.get(each) ?? null);
    // An unaccounted part below zero (clocks of two threads) does not lower the stack.
    const y = x.map((each, place) => {
      total.set(each, total.get(each) + Math.max(0, read[place] ?? 0));
      return total.get(each);
    });
    series.push({ key, label, x, y, read, color: () => color(key === held ? "held" : `part-${index + 1}`) });
  });
  return series.reverse();
}
