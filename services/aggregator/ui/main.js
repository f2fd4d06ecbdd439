// The page's frame: the run in the header, one page below it, and what both follow.

import { Problem, get, part } from "./api.js";
import { h, replace, s, throttled } from "./dom.js";
import { ago, moment } from "./format.js";
import { follow } from "./live.js";
import { address, change, current, onChange, to } from "./state.js";

const PAGES = [
  ["overview", "Overview"],
  ["metrics", "Metrics"],
  ["time", "Time"],
  ["rollouts", "Rollouts"],
  ["lineage", "Lineage"],
  ["runs", "Runs"],
  ["alerts", "Alerts"],
];
const WITH_AXIS = new Set(["overview", "metrics", "time"]);
const AXES = [
  ["step", "step"],
  ["time", "time"],
  ["relative", "relative"],
];
const NEWS_MS = 1000;
const LOST_AFTER_S = 60;

const header = document.getElementById("header");
const nav = document.getElementById("nav");
const main = document.getElementById("main");
const live = h("span", { class: "live", role: "status" }, "connecting");
const controls = h("span", { class: "header-controls" });

const context = { run: null, detail: null, runs: [], catalogue: new Map(), live: "connecting" };
let shown = null; // {page, run, attempt, view}
let stop = null;
let turn = 0;
let loading = 0;

function frame() {
  const themes = { system: "auto", light: "light", dark: "dark" };
  const order = ["system", "light", "dark"];
  const theme = h("button", { id: "theme", title: "Colours: as the system has them, light, dark (t)", onclick: () => nextTheme() });
  function sayTheme() {
    const name = themes[headraceTheme.chosen()];
    replace(theme, s("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" }, s("circle", { cx: 8, cy: 8, r: 6.5, class: "ring" }), s("path", { d: "M8 1.5a6.5 6.5 0 0 1 0 13z", class: "half" })), h("span", {}, h("span", { class: "visually-hidden" }, "theme: "), name));
  }
  function nextTheme() {
    headraceTheme.choose(order[(order.indexOf(headraceTheme.chosen()) + 1) % order.length]);
    sayTheme();
  }
  sayTheme();
  header.append(controls, live, h("span", { class: "spring" }), theme, h("button", { id: "help", onclick: help, "aria-label": "Help and keys" }, "?"));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea, dialog")) return;
    const page = PAGES[Number(event.key) - 1];
    if (page) location.hash = to(page[0]);
    else if (event.key === "r") change({ since: null, until: null });
    else if (event.key === "t") nextTheme();
    else if (event.key === "?") help();
    else if (event.key === "/") {
      const filter = document.querySelector("input[type=search]");
      if (!filter) return;
      filter.focus();
      event.preventDefault();
    }
  });
}

function help() {
  const keys = [
    ["1 … 7", "the pages"],
    ["/", "the filter"],
    ["r", "all of the x axis again; a double click on a plot does the same"],
    ["t", "system's theme, light, dark"],
    ["j, k", "the next and the previous conversation, on Rollouts"],
    ["?", "this"],
  ];
  const box = h(
    "dialog",
    { class: "dialog", "aria-labelledby": "help-title", onclose: () => box.remove() },
    h("h2", { id: "help-title" }, "Keys"),
    h("dl", { class: "facts" }, keys.map(([key, about]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, about)])),
    h("p", { class: "quiet" }, "Drag on a plot to zoom. The address holds what you see: send it to a colleague."),
    h("p", {}, h("a", { href: "docs/metrics" }, "What each metric means"), " · ", h("a", { href: "docs" }, "The API")),
    h("button", { onclick: () => box.close() }, "Close"),
  );
  document.body.append(box);
  box.showModal();
}

function drawControls(state) {
  const { detail, runs } = context;
  const run = h(
    "select",
    { id: "run", onchange: (event) => (location.hash = address({ ...current(), run: event.target.value, attempt: null, since: null, until: null, item: null })) },
    runs.map((each) => h("option", { value: each.run }, each.run)),
  );
  run.value = context.run;
  const attempts = detail?.attempts ?? [];
  const attempt = h(
    "select",
    { id: "attempt", onchange: (event) => change({ attempt: event.target.value }) },
    h("option", { value: "" }, attempts.length > 1 ? `all ${attempts.length} attempts` : attempts.length ? `attempt ${attempts[0].attempt}` : "no attempt yet"),
    attempts.length > 1 ? attempts.map((each) => h("option", { value: String(each.attempt) }, `attempt ${each.attempt}: steps ${each.first_step} to ${each.last_step}`)) : null,
  );
  attempt.value = state.attempt ?? "";
  replace(
    controls,
    h("label", {}, h("span", {}, "run"), run),
    h("label", {}, h("span", { class: "visually-hidden" }, "attempt"), attempt),
    h("span", { class: "header-step", title: detail ? `last heard of ${moment(detail.last_seen)}` : "" }, detail?.latest_step === null || !detail ? "" : `step ${detail.latest_step}`),
  );
}

function drawNav(state) {
  const before = nav.querySelector("[aria-current]")?.id;
  const links = PAGES.map(([page, title]) => h("a", { id: `to-${page}`, href: to(page), "aria-current": state.page === page ? "page" : null }, title));
  const axis = state.axis ?? "step";
  const choice = h(
    "span",
    { class: "switch", role: "group", "aria-label": "x axis" },
    AXES.map(([name, title]) =>
      h("button", { id: `axis-${name}`, "aria-pressed": String(axis === name), onclick: () => change({ axis: name === "step" ? null : name, since: null, until: null }) }, title),
    ),
  );
  const strip = h("div", { class: "nav-links" }, links);
  const at = nav.querySelector(".nav-links")?.scrollLeft ?? 0;
  replace(nav, strip, WITH_AXIS.has(state.page) ? choice : null);
  strip.scrollLeft = at;
  // On a phone the strip scrolls: the page that is shown is in sight.
  const link = strip.querySelector("[aria-current]");
  if (link && link.id !== before) strip.scrollLeft = link.offsetLeft - (strip.clientWidth - link.offsetWidth) / 2;
}

function drawLive() {
  const heard = context.detail?.last_seen;
  const silent = heard ? (Date.now() - Date.parse(heard)) / 1000 > LOST_AFTER_S : true;
  const words = {
    live: silent && heard ? `last heard of ${ago(heard)}` : "live",
    polling: "every 5 s",
    paused: "paused",
    gone: "deleted",
    connecting: "connecting",
    lost: "the aggregator does not answer",
  };
  const state = context.live === "live" && silent ? "silent" : context.live;
  context.flowing = state === "live";
  live.dataset.state = state;
  const text = words[context.live];
  if (live.textContent !== text) live.textContent = text;
}

async function load(state) {
  const mine = ++turn;
  loading += 1;
  try {
    // All that does not wait for an answer is asked for at once.
    const ready = page(state.page);
    const named = state.run && state.run !== context.run ? get(`/runs/${part(state.run)}`) : null;
    named?.catch(() => {}); // what it says is read below
    if (!context.catalogue.size) {
      const [runs, catalogue] = await Promise.all([get("/runs"), get("/catalogue"), ready]);
      context.runs = runs.runs;
      context.catalogue = new Map(catalogue.metrics.map((each) => [each.key, each]));
    }
    const run = state.run ?? context.runs[0]?.run ?? null;
    if (run !== context.run || !context.detail) {
      context.run = run;
      context.detail = run ? await (named ?? get(`/runs/${part(run)}`)) : null;
      if (run && !context.runs.some((each) => each.run === run)) context.runs = (await get("/runs")).runs;
      listen();
    }
    if (mine !== turn) return;
    await show(state);
  } catch (error) {
    if (mine === turn) failed(error);
  } finally {
    loading -= 1;
  }
}

async function show(state) {
  document.title = `${PAGES.find(([page]) => page === state.page)?.[1] ?? "Headrace"} · ${context.run ?? "no run"} · Headrace`;
  drawControls(state);
  drawNav(state);
  drawLive();
  if (!context.run && state.page !== "runs") {
    leave();
    replace(main, nothing());
    return;
  }
  if (shown && shown.page === state.page && shown.run === context.run) {
    shown.view.changed(state);
    return;
  }
  const { mount } = await page(state.page);
  leave();
  replace(main);
  shown = { page: state.page, run: context.run, view: mount(main, context) };
  shown.view.changed(state);
}

// The module of a page; the overview's for an address that is none of ours.
function page(name) {
  return import(`./pages/${PAGES.some(([known]) => known === name) ? name : "overview"}.js`);
}

function leave() {
  shown?.view.destroy?.();
  shown = null;
}

function nothing() {
  return h(
    "div",
    { class: "card" },
    h("p", { class: "empty" }, "No run has been heard of yet. ", h("code", {}, "headrace run recipe.toml"), " starts one; this page shows it as soon as it sends its first numbers."),
  );
}

function failed(error) {
  if (error.name === "AbortError") return;
  leave();
  drawNav(current());
  const gone = error instanceof Problem && error.status === 404;
  replace(
    main,
    h("p", { class: "problem", role: "alert" }, error.message),
    h("p", { class: "empty" }, gone ? h("a", { href: "#/runs" }, "All runs") : h("button", { onclick: () => load(current()) }, "Try again")),
  );
  if (!(error instanceof Problem)) throw error;
}

function listen() {
  stop?.();
  stop = null;
  if (!context.run) return;
  const run = context.run;
  stop = follow(run, {
    onState(state) {
      // That the stream does not come through is no news of an aggregator that does not answer.
      if (state === "polling" && context.live === "lost") return;
      context.live = state;
      drawLive();
    },
    onNews: throttled(NEWS_MS, () => refreshed(run)),
  });
}

async function refreshed(run) {
  // A news just before the tab was hidden waits until it is seen again.
  if (run !== context.run || document.hidden) return;
  try {
    const before = context.detail?.latest_step;
    context.detail = await get(`/runs/${part(run)}`);
    if (context.live === "lost") context.live = "live";
    if (context.detail.latest_step !== before) drawControls(current());
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    context.live = error.status === 404 ? "gone" : "lost";
  }
  drawLive();
  if (context.live !== "lost" && context.live !== "gone") shown?.view.news();
}

frame();
drawNav(current());
onChange((state) => load(state));
load(current());
setInterval(() => {
  // Not while an answer is awaited: a slow one would never be shown.
  if (!context.detail && !loading && !document.hidden) {
    context.catalogue = new Map();
    load(current());
  }
}, 5000);
