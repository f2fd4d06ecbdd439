// What several pages do the same way.

import { Problem } from "../api.js";
import { h, replace } from "../dom.js";
import { ABSENT } from "../format.js";
import { change, current } from "../state.js";

export function pending() {
  return h("p", { class: "loading" }, "Loading");
}

// `work`, with what the API refuses shown in `host`. Defects of this page are not caught.
export function shield(host, work) {
  return async (...given) => {
    try {
      await work(...given);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Problem)) throw error;
      replace(host, h("p", { class: "problem", role: "alert" }, error.message));
    }
  };
}

// Notes once that what is seen first is there: for benchmarks, and scripts that wait for it.
export function viewed() {
  const root = document.documentElement;
  if (root.dataset.viewed) return;
  performance.mark("headrace-first-view");
  root.dataset.viewed = "yes";
}

// The x axis of all charts is one: a zoom is in the address.
export function zoomed(from, until) {
  const axis = current().axis ?? "step";
  const whole = axis === "step" ? [Math.floor, Math.ceil] : [(x) => Math.floor(x / 10) * 10, (x) => Math.ceil(x / 10) * 10];
  change({ since: from === null ? null : String(whole[0](from)), until: until === null ? null : String(whole[1](until) + (axis === "step" ? 1 : 0)) });
}

// [since, until] of the x axis, null where the data say.
export function span({ since, until }) {
  return [since === undefined ? null : Number(since), until === undefined ? null : Number(until)];
}

// Groups a second past each part of the river, from how the ledger grows. `into` falls back to the
// rate at which steps take groups, until the ledger has been watched for long enough.
export class Rates {
  static #WATCH_S = 60;
  static #LEAST_S = 8;
  static #BEYOND = {
    requests: ["dispatched"],
    generators: ["generating"],
    groups: ["generated"],
    scorers: ["scoring"],
    samples: ["scored"],
    trainer: ["trained"],
  };
  static #ORDER = ["dispatched", "generating", "generated", "scoring", "scored", "queued", "trained", "dropped", "given_up", "rolled_back"];

  #seen = [];

  add(account, nowS) {
    const passed = {};
    for (const [part, [state]] of Object.entries(Rates.#BEYOND)) {
      const first = Rates.#ORDER.indexOf(state);
      passed[part] = Rates.#ORDER.slice(first).reduce((sum, each) => sum + (account.states[each] ?? 0), 0);
    }
    passed.trainer = account.trained + account.rolled_back;
    this.#seen.push({ nowS, passed });
    while (this.#seen.length > 2 && nowS - this.#seen[0].nowS > Rates.#WATCH_S) this.#seen.shift();
  }

  into(perSecond) {
    const [first, last] = [this.#seen[0], this.#seen.at(-1)];
    const spent = last.nowS - first.nowS;
    const moved = spent >= Rates.#LEAST_S && last.passed.requests > first.passed.requests;
    return Object.fromEntries(
      Object.keys(Rates.#BEYOND).map((part) => [part, moved ? Math.max(0, last.passed[part] - first.passed[part]) / spent : perSecond]),
    );
  }
}

// A table that can be scrolled sideways, by keyboard too. Rows are lists of text, numbers or
// elements; columns of numbers and durations stand at the right. `classes` are those of columns.
export function table(label, heads, rows, classes = []) {
  const side = heads.map((_head, at) => (!classes[at] && rows.every((row) => NUMERIC.test(spoken(row[at]))) ? null : "left"));
  const named = (at) => [side[at], classes[at]].filter(Boolean).join(" ") || null;
  const shown = (each) => (typeof each === "number" || each === null ? spoken(each) : each); // a list is of elements
  const cell = (each, at) => (at === 0 ? h("th", { scope: "row" }, shown(each)) : h("td", { class: named(at) }, shown(each)));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, heads.map((each, at) => (each ? h("th", { scope: "col", class: named(at) }, each) : h("td"))))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))),
    ),
  );
}

const NUMERIC = /^[−—∞\d]|^now$/;

function spoken(each) {
  if (each === null) return ABSENT;
  if (Array.isArray(each)) return each.map(spoken).join("");
  return each instanceof Node ? each.textContent : String(each);
}

// What is not there, with why on hover.
export function absent(reason) {
  return h("span", { title: reason }, ABSENT);
}

// Names with their values.
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

// A sentence of the API: a capital, a full stop, and `code` between backticks.
export function prose(text) {
  const whole = `${text[0]?.toUpperCase() ?? ""}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
  return whole.split("`").map((each, at) => (at % 2 ? h("code", {}, each) : each));
}
