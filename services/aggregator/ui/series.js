// Histories as the API has them, made ready to be drawn.

import { get } from "./api.js";

const DAY_S = 86400;

// Histories of `keys` in several sources: {detail (of /runs/{run}), attempt (a number; nothing is the
// line of steps that survived)}. `view`: axis ("step", "time" or "relative": seconds since each
// source began), since, until (in the axis' own numbers), split (by producer), maxPoints, reduce.
// In the order of the sources, each with its `source` (an index) and its `shift`.
export async function histories(sources, keys, view, { signal } = {}) {
  const relative = view.axis === "relative";
  const numbered = sources.map((each, index) => ({ ...each, index, shift: relative ? begin(each) : 0 }));
  // One answer is of one attempt and one range.
  const asked = [...Map.groupBy(numbered, (each) => `${each.attempt ?? ""} ${each.shift}`).values()];
  const answers = await Promise.all(
    asked.map((some) =>
      get(
        "/history",
        {
          run: some.map((each) => each.detail.run),
          key: keys,
          axis: view.axis === "step" || !view.axis ? "step" : "time",
          attempt: some[0].attempt,
          reduce: view.reduce,
          since: moved(view.since, some[0].shift, Math.floor),
          until: moved(view.until, some[0].shift, Math.ceil),
          max_points: view.maxPoints ?? 600,
          group_by: view.split ? "producer" : null,
        },
        { signal },
      ),
    ),
  );
  const found = answers.flatMap((answer, at) =>
    answer.histories.map((history) => {
      const { index, shift } = asked[at].find((each) => each.detail.run === history.run);
      return { ...history, source: index, shift };
    }),
  );
  return found.sort((a, b) => a.source - b.source);
}

// When a source began: seconds since 1970, on the 10 s that windows begin at.
export function begin({ detail, attempt }) {
  const own = attempt ? detail.attempts.find((each) => each.attempt === Number(attempt)) : null;
  return Math.floor(Date.parse((own ?? detail).first_seen) / 10000) * 10;
}

// Columns of a history's points: {x, value, low, high, odd}, absent values null. `low` and `high`
// are null where no point has them; `odd` counts NaNs and infinities.
export function columns(points, shift = 0) {
  const x = points.map((point) => point.x - shift);
  const value = points.map((point) => point.value);
  const banded = points.some((point) => point.low !== undefined);
  const odd = points.reduce(
    (sum, point) => sum + (point.nan ?? 0) + (point.pos_inf ?? 0) + (point.neg_inf ?? 0),
    0,
  );
  return {
    x,
    value,
    low: banded ? points.map((point) => point.low ?? point.value) : null,
    high: banded ? points.map((point) => point.high ?? point.value) : null,
    odd,
  };
}

// An exponential mean with the weight of the past, without the pull of its beginning: each value is
// divided by the weight that has come together. A gap stays a gap.
// smoothed([1, 3], 0.5) -> [1, (0.25 + 1.5) / 0.75 = 2.333]
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Several series on one axis, for uPlot: [x, y1, y2, ...], null where a series has no point. A
// series that has no point at an x does not end there: undefined joins its neighbours.
export function aligned(tables) {
  const all = new Set();
  for (const { x } of tables) for (const each of x) all.add(each);
  const x = [...all].sort((a, b) => a - b);
  const place = new Map(x.map((each, index) => [each, index]));
  const ys = tables.map((table) => {
    const y = new Array(x.length).fill(undefined);
    table.x.forEach((each, index) => (y[place.get(each)] = table.y[index]));
    return y;
  });
  return [x, ...ys];
}

// The last value that there is, with its x; null where there is none.
export function last(table) {
  for (let index = table.x.length - 1; index >= 0; index -= 1) {
    if (table.value[index] !== null) return { x: table.x[index], value: table.value[index] };
  }
  return null;
}

function moved(text, shift, round) {
  if (text === undefined || text === null || text === "") return null;
  const value = round(Number(text) + shift);
  return Number.isFinite(value) && Math.abs(value) < DAY_S * 1e9 ? String(value) : null;
}
