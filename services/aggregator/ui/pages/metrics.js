// Metrics: all that a run has, by namespace; several runs over each other, or each replica alone.
// Only what is in sight is asked for and drawn.

import { Problem, get, part } from "../api.js";
import { Chart, categorical } from "../chart.js";
import { color, h, replace, throttled } from "../dom.js";
import { columns, histories, smoothed } from "../series.js";
import { change } from "../state.js";
import { pending, span, viewed, zoomed } from "./shared.js";

const TOP = "loss and policy";
const MAX_KEYS = 24;
const GATHER_MS = 30;
const MARGIN = "500px 0px";
const MAX_REPLICAS = 8;
const DASHES = [null, [7, 3], [2, 3], [9, 3, 2, 3]]; // lines differ by more than their colour

export function mount(main, context) {
  const tools = h("div", { class: "tools", role: "group", "aria-label": "What is shown" });
  const list = h("div", {}, pending());
  main.append(h("h1", { class: "visually-hidden" }, "Metrics"), tools, list);
  const slots = new Map(); // key -> {key, host, chart, inSight, drawn}
  const details = new Map([[context.run, context.detail]]);
  let state = {};
  let metrics = null;
  let listed = "";
  let gathered = new Set();
  let timer = null;
  let generation = 0;

  const sight = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const slot = slots.get(entry.target.dataset.key);
        if (!slot) continue;
        slot.inSight = entry.isIntersecting;
        if (slot.inSight) wanted(slot);
        else blank(slot);
      }
    },
    { rootMargin: MARGIN },
  );

  function blank(slot) {
    slot.chart?.destroy();
    slot.chart = null;
  }

  function wanted(slot) {
    gathered.add(slot.key);
    timer ??= setTimeout(ask, GATHER_MS);
  }

  async function ask() {
    timer = null;
    const keys = [...gathered].filter((key) => slots.get(key)?.inSight);
    gathered = new Set();
    const mine = generation;
    const shown = [{ run: context.run, attempt: state.attempt }, ...compared(state)];
    try {
      details.set(context.run, context.detail);
      const unknown = [...new Set(shown.map((each) => each.run))].filter((run) => !details.has(run));
      for (const detail of await Promise.all(unknown.map((run) => get(`/runs/${part(run)}`)))) details.set(detail.run, detail);
      const sources = shown.map((each) => ({ detail: details.get(each.run), attempt: each.attempt }));
      const view = { ...state, split: state.split && sources.length === 1, maxPoints: 500 };
      for (let at = 0; at < keys.length; at += MAX_KEYS) {
        const some = keys.slice(at, at + MAX_KEYS);
        const found = await histories(sources, some, view);
        if (mine !== generation) return;
        for (const key of some) draw(slots.get(key), found.filter((each) => each.key === key));
      }
      viewed();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      for (const key of keys) chartOf(slots.get(key)).empty(error.message);
    }
  }

  function chartOf(slot) {
    if (!slot.chart) {
      const declared = context.catalogue.get(slot.metric.key) ?? declaredFor(slot.key);
      const about = declared ? `${slot.key}: ${declared.meaning} (${slot.metric.reduce}, ${slot.metric.unit})` : slot.key;
      slot.chart = new Chart({ title: slot.key, about, unit: slot.metric.unit, onZoom: zoomed });
      slot.host.append(slot.chart.element);
    }
    return slot.chart;
  }

  function declaredFor(key) {
    for (const [pattern, declared] of context.catalogue) {
      if (pattern.includes("{") && matches(pattern, key)) return declared;
    }
    return null;
  }

  function draw(slot, found) {
    if (!slot?.inSight) return;
    const weight = Number(state.smooth ?? 0);
    const series = found.flatMap((history, index) => {
      const label = found.length > 1 ? named([{ run: context.run, attempt: state.attempt }, ...compared(state)][history.source]) : slot.key;
      const tint = found.length > 1 ? () => categorical(index) : () => color("ink");
      const replicas = Object.entries(history.by_producer ?? {});
      if (state.split && replicas.length) {
        return replicas.slice(0, MAX_REPLICAS).map(([producer, points], at) => ({ ...lined(producer, () => categorical(at), points, history, weight, false), dash: DASHES[at % DASHES.length] }));
      }
      return [{ ...lined(label, tint, history.points, history, weight, state.band !== "0"), dash: DASHES[index % DASHES.length] }];
    });
    chartOf(slot).draw(series, { axis: state.axis ?? "step", log: state.log === "1", span: span(state) });
  }

  function lined(label, tint, points, history, weight, banded) {
    const table = columns(points, history.shift);
    return {
      label,
      color: tint,
      x: table.x,
      y: weight ? smoothed(table.value, weight) : table.value,
      read: table.value,
      faint: weight ? table.value : null,
      low: banded ? table.low : null,
      high: banded ? table.high : null,
    };
  }

  function drawList() {
    const pattern = compiled(state.filter);
    const note = tools.querySelector(".filter-note");
    if (note) note.textContent = pattern.error ?? "";
    const chosen = metrics.filter((each) => pattern.test(each.key));
    const signature = chosen.map((each) => each.key).join("\n");
    if (signature !== listed || !chosen.length) {
      listed = signature;
      for (const slot of slots.values()) blank(slot);
      slots.clear();
      sight.disconnect();
      const groups = Map.groupBy(chosen, (each) => (each.key.includes("/") ? each.key.split("/")[0] : TOP));
      const names = [...groups.keys()].sort((a, b) => (a === TOP ? -1 : b === TOP ? 1 : a.localeCompare(b)));
      replace(
        list,
        names.map((name) => group(name, groups.get(name))),
        chosen.length ? null : h("p", { class: "empty" }, metrics.length ? "No metric of this run matches the filter." : "This run has no metric yet."),
      );
      return;
    }
    for (const each of chosen) slots.get(each.key).metric = each;
    again();
  }

  function again() {
    for (const slot of slots.values()) if (slot.inSight) wanted(slot);
  }

  function group(name, some) {
    const cells = some.map((metric) => {
      const host = h("div", { class: "slot", data: { key: metric.key } });
      slots.set(metric.key, { key: metric.key, metric, host, chart: null, inSight: false });
      sight.observe(host);
      return host;
    });
    return h("details", { class: "group", open: true }, h("summary", {}, name, h("span", {}, String(some.length))), h("div", { class: "grid" }, cells));
  }

  async function load() {
    try {
      metrics = (await get(`/runs/${part(context.run)}/metrics`)).metrics;
      drawList();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      replace(list, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  function drawTools() {
    const filter = h("input", {
      id: "filter",
      type: "search",
      placeholder: "^perf/ or reward|loss",
      title: "A regular expression that the names of metrics match",
      value: state.filter ?? "",
      oninput: throttled(200, () => change({ filter: document.getElementById("filter").value }, { quiet: true })),
    });
    const smooth = h("input", {
      id: "smooth",
      type: "range",
      min: "0",
      max: "0.99",
      step: "0.01",
      value: state.smooth ?? "0",
      oninput: throttled(60, () => {
        const value = document.getElementById("smooth").value;
        change({ smooth: value === "0" ? null : value }, { quiet: true });
      }),
    });
    const flag = (name, title, on, off = null) => {
      const set = state[name] === on;
      return h("button", { id: `flag-${name}`, "aria-pressed": String(off === null ? set : !set), onclick: () => change({ [name]: set ? null : on }) }, title);
    };
    const chosen = compared(state);
    const taken = new Set([named({ run: context.run, attempt: state.attempt }), ...chosen.map(named)]);
    const choice = (source, title) => (taken.has(named(source)) ? null : h("option", { value: written(source) }, title));
    const runs = context.runs.filter((each) => each.run !== context.run).map((each) => choice({ run: each.run }, each.run));
    const attempts = [
      choice({ run: context.run }, "all attempts as one"),
      ...context.detail.attempts.map((each) => choice({ run: context.run, attempt: String(each.attempt) }, `attempt ${each.attempt}`)),
    ];
    const groups = [
      [`attempts of ${context.run}`, context.detail.attempts.length > 1 ? attempts : []],
      ["runs", runs],
    ].map(([label, options]) => [label, options.filter(Boolean)]);
    const compare = h(
      "select",
      { id: "compare", onchange: (event) => change({ compare: [...chosen.map(written), event.target.value].join(","), split: null }) },
      h("option", { value: "" }, "compare with …"),
      groups.map(([label, options]) => (options.length ? h("optgroup", { label }, options) : null)),
    );
    compare.setAttribute("aria-label", "Compare with another run or attempt");
    replace(
      tools,
      h("label", {}, "filter", filter),
      h("span", { class: "filter-note failed", role: "status", hidden: true }),
      h("label", {}, "smoothing", smooth, h("span", {}, state.smooth ?? "0")),
      flag("log", "log scale", "1"),
      flag("band", "min to max", "0", "1"),
      chosen.length ? null : flag("split", "each replica", "1"),
      groups.some(([, options]) => options.length) ? compare : null,
      chosen.map((source) => h("button", { class: "chip", onclick: () => change({ compare: chosen.filter((each) => each !== source).map(written).join(",") }), "aria-label": `Stop comparing with ${named(source)}` }, named(source), " ×")),
      state.since || state.until ? h("button", { id: "reset", onclick: () => change({ since: null, until: null }) }, "reset zoom (r)") : null,
    );
    const pattern = compiled(state.filter);
    const note = tools.querySelector(".filter-note");
    note.hidden = !pattern.error;
    note.textContent = pattern.error ?? "";
  }

  return {
    changed(next) {
      const typing = document.activeElement?.id;
      const before = state;
      state = next;
      generation += 1;
      // The field that is being typed into stays the one it is.
      if (!(before.page && (typing === "filter" || typing === "smooth"))) drawTools();
      if (metrics) drawList();
      else load();
    },
    news: load,
    destroy() {
      sight.disconnect();
      clearTimeout(timer);
      for (const slot of slots.values()) blank(slot);
    },
  };
}

// What is drawn too: runs, and attempts of runs as "run@attempt".
function compared(state) {
  const texts = (state.compare ?? "").split(",").filter(Boolean);
  return texts.map((text) => {
    const [run, attempt] = text.split("@");
    return { run, attempt };
  });
}

function written({ run, attempt }) {
  return attempt ? `${run}@${attempt}` : run;
}

function named({ run, attempt }) {
  return attempt ? `${run}, attempt ${attempt}` : run;
}

// Whether a key is one of `rewards/{function}`: a brace stands for one part.
export function matches(pattern, key) {
  const parts = pattern.split("/");
  const given = key.split("/");
  return parts.length === given.length && parts.every((each, index) => each.startsWith("{") || each === given[index]);
}

// A filter as people type it: an expression that is not whole yet filters nothing and says why.
function compiled(text) {
  if (!text) return { test: () => true };
  try {
    const expression = new RegExp(text);
    return { test: (key) => expression.test(key) };
  } catch (error) {
    return { test: () => true, error: error.message };
  }
}
