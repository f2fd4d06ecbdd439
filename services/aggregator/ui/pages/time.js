// Time: where each step's seconds go, as a stack, as medians and shares, and the verdict over time.

import { Problem, get, part } from "../api.js";
import { HELD, KEYS, PARTS, stacked } from "../budget.js";
import { Chart } from "../chart.js";
import { color, h, replace } from "../dom.js";
import { exact, percent, seconds } from "../format.js";
import { columns, histories } from "../series.js";
import { to } from "../state.js";
import { absent, pending, shield, span, zoomed } from "./shared.js";

const WINDOW_STEPS = 20;

export function mount(main, context) {
  const words = h("p", { class: "said" });
  const table = h("section", { class: "card", "aria-label": "Parts of a step" }, pending());
  const past = h("section", { class: "card", "aria-label": "The verdict over time" }, h("h2", {}, "The verdict over time"), pending());
  const chart = new Chart({ title: "Seconds of each step", about: "Parts are disjoint and add up to perf/step_s.", unit: "s", height: 320, onZoom: zoomed });
  main.append(h("h1", { class: "visually-hidden" }, "Time"), h("div", { class: "stack" }, h("section", { class: "card verdict short" }, words), chart.element, table, past));
  let state = {};
  const path = `/runs/${part(context.run)}`;

  const draw = shield(table, async () => {
    const view = { ...state, axis: state.axis ?? "step", maxPoints: 800 };
    const [found, verdict] = await Promise.all([
      histories([{ detail: context.detail, attempt: state.attempt }], [...KEYS, "perf/step_s"], view),
      get(`${path}/verdict`, { window: WINDOW_STEPS }),
    ]);
    const held = HELD[verdict.verdict];
    words.textContent = `${verdict.sentence[0].toUpperCase()}${verdict.sentence.slice(1)}.`;
    chart.draw(stacked(found.filter((each) => each.key !== "perf/step_s"), held), { axis: view.axis, span: span(state), stacked: true, share: true });
    replace(table, ...rows(found, held));
  });

  // Not Math.min(...values): there may be more values than a call takes arguments.
  const least = (values) => values.reduce((low, each) => (each < low ? each : low));

  function rows(found, held) {
    const of = (key) => {
      const history = found.find((each) => each.key === key);
      return columns(history.points, history.shift).value.filter((value) => value !== null);
    };
    const mean = (values) => (values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null);
    const whole = mean(of("perf/step_s"));
    const line = (key, label, index) => {
      const values = of(key);
      const average = mean(values);
      const swatch = h("i", { class: "swatch" });
      if (index === null) swatch.style.visibility = "hidden";
      else swatch.style.color = color(key === held ? "held" : `part-${index + 1}`);
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, swatch, " ", h("a", { href: to("metrics", { filter: `^${key}$` }) }, label), key === held ? " (the dam)" : ""),
        h("td", { title: exact(average, "s") }, seconds(average)),
        ...[
          whole && average !== null ? percent(average / whole) : null,
          values.length ? seconds(least(values)) : null,
          values.length ? seconds(-least(values.map((value) => -value))) : null,
        ].map((text) => h("td", {}, text ?? absent("nothing was observed in this range"))),
      );
    };
    return [
      h("h2", {}, "Parts of a step, on the average of what is shown"),
      h(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Parts of a step" },
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, ["part", "mean", "share", "least", "most"].map((each) => h("th", { scope: "col" }, each)))),
          h("tbody", {}, PARTS.map(([key, label], index) => line(key, label, index)), line("perf/step_s", "a step", null)),
        ),
      ),
    ];
  }

  async function drawPast() {
    const title = h("h2", {}, "The verdict over time");
    try {
      const found = await get(`${path}/verdict/history`, { window: WINDOW_STEPS, max_points: 200 });
      const list = found.verdicts;
      // One line for each stretch of windows with the same verdict.
      const stretches = [];
      for (const each of list) {
        const before = stretches.at(-1);
        if (before?.verdict === each.verdict) {
          before.last_step = each.last_step;
          before.all.push(each);
        } else {
          stretches.push({ verdict: each.verdict, first_step: each.first_step, last_step: each.last_step, all: [each] });
        }
      }
      const middle = (values) => {
        const known = values.filter((value) => value !== null).sort((a, b) => a - b);
        return known.length ? known[Math.floor(known.length / 2)] : null;
      };
      replace(
        past,
        title,
        stretches.length
          ? h(
              "div",
              { class: "scroll", tabindex: "0", role: "region", "aria-label": "The verdict over time" },
              h(
                "table",
                {},
                h("thead", {}, h("tr", {}, ["steps", "verdict", "share of a step", "a step"].map((each, at) => h("th", { scope: "col", class: at < 2 ? "left" : null }, each)))),
                h(
                  "tbody",
                  {},
                  stretches.reverse().map((each) =>
                    h("tr", {}, h("th", { scope: "row" }, `${each.first_step} to ${each.last_step}`), h("td", { class: "left" }, each.verdict), h("td", {}, percent(middle(each.all.map((one) => one.share)))), h("td", {}, seconds(middle(each.all.map((one) => one.step_s))))),
                  ),
                ),
              ),
            )
          : h("p", { class: "empty" }, "No window of steps is complete yet."),
      );
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      replace(past, title, h("p", { class: "problem" }, error.message));
    }
  }

  return {
    changed(next) {
      state = next;
      draw();
      drawPast();
    },
    news: draw,
    destroy: () => chart.destroy(),
  };
}
