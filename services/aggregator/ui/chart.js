// One chart: a title with the value, a plot, a legend of buttons, and the same numbers as a table.

import uPlot from "./vendor/uPlot.esm.js";
import { color, h, replace } from "./dom.js";
import { ABSENT, exact, measured, number, percent, seconds } from "./format.js";
import { aligned } from "./series.js";

const SYNC = "page";
const TABLE_ROWS = 200;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const RELATIVE_S = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
const STEPS = Array.from({ length: 10 }, (_each, at) => [1, 2, 5].map((each) => each * 10 ** at)).flat();
const MOVES = new Set(["mousemove", "mouseleave", "mouseenter"]);

// Colours of runs, replicas and rewards: Okabe and Ito's, which colour-blind readers tell apart.
export function categorical(index) {
  return color(`cat-${(index % 8) + 1}`);
}

export class Chart {
  // `title`, `about` (shown on hover), `unit`, `height`, `href` (of the title), `onZoom(since,
  // until)` with null for all of it.
  constructor({ title, about = "", unit = "1", height = 150, href = null, onZoom }) {
    this.unit = unit;
    this.height = height;
    this.title = title;
    this.onZoom = onZoom;
    this.hidden = new Set();
    this.tabled = false;
    this.now = h("span", { class: "chart-now" });
    this.plot = h("div", { class: "plot", role: "img", "aria-label": `${title}: loading` });
    this.legend = h("div", { class: "legend" });
    this.table = h("div", { class: "chart-table", hidden: true, tabindex: "0", role: "region", "aria-label": `${title} as a table` });
    this.button = h("button", { class: "small", "aria-pressed": "false", onclick: () => this.#toggleTable() }, "Table");
    this.button.setAttribute("aria-label", `${title} as a table`);
    const name = href ? h("a", { href }, title) : title;
    this.element = h(
      "section",
      { class: "chart" },
      h("header", {}, h("h3", { title: about }, name), this.now, this.button),
      this.plot,
      this.legend,
      this.table,
    );
    this.observer = new ResizeObserver(() => this.#resize());
    this.observer.observe(this.plot);
    this.themed = () => {
      this.signature = null;
      if (this.drawn) this.draw(this.drawn.series, this.drawn.options);
    };
    addEventListener("headrace-theme", this.themed);
  }

  // Draw series: {label, color (a function), x, y, read, low, high, faint, fill, dots, step}.
  // `y` is drawn, `read` (default y) is said; `fill` is the index of the series below. Options:
  // axis, log, span ([since, until] of the x axis), unit, headline (text instead of the last
  // value), share (values are said with their share of the total).
  draw(series, options) {
    this.drawn = { series, options };
    if (!series.some((each) => each.y.some((value) => value !== null && value !== undefined))) {
      this.empty(options.reason ?? "Nothing was recorded in this range.");
      return;
    }
    this.plot.classList.remove("is-empty");
    this.plot.setAttribute("role", "img");
    const flat = series.flatMap((each) => this.#parts(each, options.log));
    this.data = aligned(flat.map((each) => ({ x: each.x, y: each.y })));
    this.reads = aligned(series.map((each) => ({ x: each.x, y: each.read ?? each.y }))).slice(1);
    const signature = JSON.stringify([
      options.axis,
      options.log,
      flat.map((each) => [each.owner.label, each.kind, each.owner.color()]),
      [...this.hidden],
    ]);
    if (this.uplot && signature === this.signature) {
      this.uplot.setData(this.data, false);
    } else {
      this.signature = signature;
      this.uplot?.destroy();
      this.plot.replaceChildren();
      this.uplot = new uPlot(this.#settings(flat, options), this.data, this.plot);
    }
    const [x] = this.data;
    const span = options.span ?? [];
    const from = span[0] ?? x[0];
    const to = span[1] ?? x[x.length - 1];
    this.uplot.setScale("x", { min: from, max: to > from ? to : from + 1 });
    this.#say(null);
    this.plot.setAttribute("aria-label", this.#described());
    if (this.tabled) this.#fillTable();
  }

  // Say why there is no plot.
  empty(reason) {
    this.uplot?.destroy();
    this.uplot = null;
    this.signature = null;
    this.plot.classList.add("is-empty");
    this.plot.removeAttribute("aria-label");
    this.plot.removeAttribute("role");
    replace(this.plot, h("p", { class: "empty" }, reason));
    replace(this.legend);
    this.now.textContent = ABSENT;
    this.now.title = reason;
  }

  destroy() {
    this.observer.disconnect();
    removeEventListener("headrace-theme", this.themed);
    this.uplot?.destroy();
    this.uplot = null;
    this.element.remove();
  }

  #parts(each, log) {
    const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
    const made = [];
    if (each.low) {
      made.push({ owner: each, kind: "high", x: each.x, y: positive(each.high) });
      made.push({ owner: each, kind: "low", x: each.x, y: positive(each.low) });
    }
    if (each.faint) made.push({ owner: each, kind: "faint", x: each.x, y: positive(each.faint) });
    made.push({ owner: each, kind: "line", x: each.x, y: positive(each.y) });
    return made;
  }

  #settings(flat, { axis, log, stacked }) {
    const line = color("line");
    const quiet = color("quiet");
    const bands = [];
    const series = flat.map(({ owner, kind }, index) => {
      const tint = owner.color();
      const show = !this.hidden.has(owner.label);
      if (kind === "high") {
        if (show) bands.push({ series: [index + 1, index + 2], fill: transparent(tint, 0.16) });
        return { show, width: 0, points: { show: false } };
      }
      if (kind === "low") return { show, width: 0, points: { show: false } };
      if (kind === "faint") {
        return { show, stroke: transparent(tint, 0.28), width: 1, points: { show: false } };
      }
      return {
        show,
        stroke: stacked ? color("panel") : tint,
        width: owner.dots ? 0 : stacked ? 0.5 : 1.5,
        fill: stacked ? tint : undefined,
        dash: owner.dash ?? undefined,
        points: owner.dots ? { show: true, size: 6, fill: tint, stroke: tint } : { show: flat.length && owner.x.length === 1, size: 5 },
      };
    });
    const ticks = { stroke: line, width: 1, size: 4 };
    const grid = { stroke: line, width: 1 };
    return {
      width: Math.max(80, this.plot.clientWidth),
      height: this.#tall(),
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: SYNC, setSeries: false, filters: { pub: (type) => MOVES.has(type) } },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        bind: { dblclick: () => () => this.onZoom?.(null, null) },
      },
      scales: {
        x: { time: axis === "time", auto: false },
        y: { distr: log ? 3 : 1, range: log ? undefined : (_u, low, high) => padded(low, high, stacked) },
      },
      axes: [
        {
          stroke: quiet,
          font: FONT,
          grid: { show: false },
          ticks,
          size: 26,
          space: axis === "step" ? 50 : 72,
          incrs: axis === "relative" ? RELATIVE_S : axis === "step" ? STEPS : undefined,
          values: axis === "time" ? undefined : (_u, splits) => splits.map((each) => this.#at(each, axis)),
        },
        {
          stroke: quiet,
          font: FONT,
          grid,
          ticks: { show: false },
          size: 52,
          values: (_u, splits) => splits.map((each) => (each === null ? "" : this.#short(each))),
        },
      ],
      series: [{}, ...series],
      bands,
      hooks: {
        setCursor: [(u) => this.#say(u.cursor.idx ?? null)],
        setSelect: [
          (u) => {
            if (u.select.width < 4) return;
            const from = u.posToVal(u.select.left, "x");
            const to = u.posToVal(u.select.left + u.select.width, "x");
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            this.onZoom?.(from, to);
          },
        ],
      },
    };
  }

  #short(value) {
    return (this.unit === "s" ? seconds(value) : number(value)).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
  }

  #at(x, axis) {
    if (axis === "relative") return seconds(x);
    if (axis === "time") return new Date(x * 1000).toLocaleTimeString();
    return Number.isInteger(x) ? String(x) : "";
  }

  // The values under the cursor, or the last ones.
  #say(index) {
    const { series, options } = this.drawn;
    const [x] = this.data;
    const values = series.map((_each, number_) => {
      const read = this.reads[number_];
      if (index !== null) return read[index] ?? null;
      for (let at = read.length - 1; at >= 0; at -= 1) {
        if (read[at] !== null && read[at] !== undefined) return read[at];
      }
      return null;
    });
    const total = values.reduce((sum, value) => sum + (value ?? 0), 0);
    const where = index === null ? "" : `${options.axis === "step" ? "step " : ""}${this.#at(x[index], options.axis)}`;
    if (options.headline && index === null) {
      this.now.textContent = options.headline;
    } else {
      const value = options.share ? total : values[0];
      const said = series.length > 1 && !options.share ? "" : measured(value, this.unit);
      this.now.textContent = [where, said].filter(Boolean).join(" · ");
    }
    this.now.title = exact(values[0], this.unit);
    if (series.length < 2) {
      replace(this.legend);
      return;
    }
    const said = (value) => {
      const text = measured(value, this.unit);
      return options.share && value !== null && total > 0 ? `${text} · ${percent(value / total)}` : text;
    };
    const buttons = [...this.legend.children];
    if (buttons.length === series.length && buttons.every((each, at) => each.dataset.label === series[at].label)) {
      buttons.forEach((each, at) => {
        each.querySelector(".legend-value").textContent = said(values[at]);
        each.querySelector(".swatch").style.color = series[at].color();
      });
      return;
    }
    replace(
      this.legend,
      series.map((each, at) => {
        const swatch = h("i", { class: each.dash === undefined ? "swatch" : "swatch line", data: { dash: each.dash ? String(each.dash.length === 4 ? "dashdot" : each.dash[0] > 2 ? "dashed" : "dotted") : "solid" } });
        swatch.style.color = each.color();
        return h(
          "button",
          {
            class: "legend-entry",
            data: { label: each.label },
            "aria-pressed": String(!this.hidden.has(each.label)),
            onclick: (event) => this.#toggle(each.label, event.currentTarget),
          },
          swatch,
          h("span", {}, each.label),
          h("span", { class: "legend-value" }, said(values[at])),
        );
      }),
    );
  }

  #toggle(label, button) {
    if (this.hidden.has(label)) this.hidden.delete(label);
    else this.hidden.add(label);
    button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
    this.draw(this.drawn.series, this.drawn.options);
  }

  #toggleTable() {
    this.tabled = !this.tabled;
    this.table.hidden = !this.tabled;
    this.plot.hidden = this.tabled;
    this.button.setAttribute("aria-pressed", String(this.tabled));
    if (this.tabled && this.data) this.#fillTable();
    else this.#resize();
  }

  #fillTable() {
    const { series, options } = this.drawn;
    const [x] = this.data;
    const rows = [];
    for (let index = x.length - 1; index >= 0 && rows.length < TABLE_ROWS; index -= 1) {
      rows.push(
        h(
          "tr",
          {},
          h("th", { scope: "row" }, this.#at(x[index], options.axis)),
          this.reads.map((read) => h("td", { title: exact(read[index], this.unit) }, measured(read[index], this.unit))),
        ),
      );
    }
    const heads = [options.axis === "step" ? "step" : "time", ...series.map((each) => each.label)];
    replace(
      this.table,
      h("table", {}, h("thead", {}, h("tr", {}, heads.map((each) => h("th", { scope: "col" }, each)))), h("tbody", {}, rows)),
      x.length > TABLE_ROWS ? h("p", { class: "quiet" }, `The last ${TABLE_ROWS} of ${x.length}; drag on the plot for others.`) : null,
    );
  }

  #described() {
    const { options } = this.drawn;
    const [x] = this.data;
    return `${this.title}, ${options.axis === "step" ? "steps " : ""}${this.#at(x[0], options.axis)} to ${this.#at(x[x.length - 1], options.axis)}, last ${this.now.textContent}`;
  }

  // A card that is higher than its plot needs gives it the room.
  #tall() {
    return Math.max(this.height, this.plot.clientHeight);
  }

  #resize() {
    const [width, height] = [this.plot.clientWidth, this.#tall()];
    if (!this.uplot || width === 0) return;
    if (Math.abs(width - this.uplot.width) > 1 || Math.abs(height - this.uplot.height) > 1) this.uplot.setSize({ width, height });
  }
}

function padded(low, high, stacked) {
  if (low === null || high === null) return [0, 1];
  if (stacked) return [0, high * 1.05 || 1];
  // What differs in its last digits only is constant: 0.93 and 0.9300000000000002.
  if (high - low <= Math.max(Math.abs(low), Math.abs(high)) * 1e-9) {
    const room = Math.abs(low) * 0.1 || 1;
    return [low - room, high + room];
  }
  const room = (high - low) * 0.08;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// "#rrggbb" with an opacity of 0 to 1.
function transparent(hex, opacity) {
  const part = Math.round(opacity * 255)
    .toString(16)
    .padStart(2, "0");
  return `${hex}${part}`;
}
