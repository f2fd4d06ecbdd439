// Runs: all that the aggregator has heard of; one's recipe, processes and latest values, alone or
// beside another's.

import { get, part } from "../api.js";
import { h, replace } from "../dom.js";
import { ago, exact, measured, moment, whole } from "../format.js";
import { address, change } from "../state.js";
import { recipeCard } from "./recipes.js";
import { absent, pending, shield, table } from "./shared.js";

export function mount(main, context) {
  const list = h("section", { class: "card" }, pending());
  const recipe = h("section", { class: "card recipe", hidden: true });
  const values = h("section", { class: "card", hidden: true });
  const processes = h("section", { class: "card", hidden: true });
  main.append(
    h("h1", { class: "visually-hidden" }, "Runs"),
    h("div", { class: "stack" }, list, h("div", { class: "run-cards" }, h("div", { class: "stack" }, recipe), h("div", { class: "stack" }, processes, values))),
  );
  let state = {};

  const drawList = shield(list, async () => {
    const { runs } = await get("/runs");
    context.runs = runs;
    const time = (iso) => h("time", { datetime: iso, title: moment(iso) }, ago(iso));
    replace(
      list,
      h("h2", {}, `${runs.length} ${runs.length === 1 ? "run" : "runs"}`),
      runs.length
        ? table(
            "Runs",
            ["run", "attempt", "step", "began", "last heard of", "processes", "missing batches", "kept until", ""],
            runs.map((each) => [
              h("a", { href: address({ page: "overview", run: each.run }), "aria-current": each.run === context.run ? "true" : null }, each.run),
              each.attempt ?? absent("its trainer has not sent a metric yet"),
              each.latest_step === null ? absent("its trainer has not sent a metric yet") : whole(each.latest_step),
              time(each.first_seen),
              time(each.last_seen),
              whole(each.num_producers),
              each.missing_batches ? h("span", { class: "warned" }, whole(each.missing_batches)) : "0",
              each.kept_until ? h("time", { datetime: each.kept_until, title: moment(each.kept_until) }, new Date(each.kept_until).toLocaleDateString()) : "for ever",
              each.run === context.run
                ? h("span", { class: "quiet" }, "shown here")
                : [
                    h("a", { href: address({ page: "runs", run: each.run }) }, "show"),
                    "  ",
                    h("button", { id: `beside-${each.run}`, "aria-pressed": String(state.beside === each.run), onclick: () => change({ beside: state.beside === each.run ? null : each.run }) }, `compare with ${context.run}`),
                  ],
            ]),
          )
        : h("p", { class: "empty" }, "No run has been heard of yet. ", h("code", {}, "headrace run recipe.toml"), " starts one."),
    );
  });

  const names = () => [context.run, ...(state.beside && state.beside !== context.run ? [state.beside] : [])];
  const each = (path) => Promise.all(names().map((name) => get(`/runs/${part(name)}${path}`)));

  const drawRecipe = shield(recipe, async () => {
    recipe.hidden = !context.run;
    if (recipe.hidden) return;
    const all = state.all === "1";
    const toggle = (words) => h("button", { id: "all", "aria-pressed": String(all), onclick: () => change({ all: all ? null : "1" }) }, words);
    replace(recipe, ...recipeCard(await each("/recipes"), { all, toggle }));
  });

  const drawProcesses = shield(processes, async () => {
    processes.hidden = !context.run;
    if (processes.hidden) return;
    const details = await each("");
    const several = details.length > 1;
    replace(
      processes,
      h("h2", {}, "Processes"),
      table(
        "Processes",
        ["process", ...(several ? ["run"] : []), "first seen", "last seen", "missing batches"],
        details.flatMap((detail) =>
          detail.producers.map((one) => [
            one.producer,
            ...(several ? [detail.run] : []),
            h("span", { title: moment(one.first_seen) }, ago(one.first_seen)),
            h("span", { title: moment(one.last_seen) }, ago(one.last_seen)),
            one.missing_batches ? h("span", { class: "warned" }, whole(one.missing_batches)) : "0",
          ]),
        ),
      ),
    );
  });

  const drawValues = shield(values, async () => {
    values.hidden = !context.run;
    if (values.hidden) return;
    const shown = names();
    const found = (await each("/metrics")).map((answer) => new Map(answer.metrics.map((one) => [one.key, one])));
    const keys = [...new Set(found.flatMap((one) => [...one.keys()]))].sort();
    const cell = (one) =>
      one ? h("span", { title: `${exact(one.value, one.unit)} (${one.reduce}, step ${one.step ?? "unknown"})` }, measured(one.value ?? null, one.unit)) : absent("this run has not recorded it");
    replace(
      values,
      h("h2", {}, shown.length > 1 ? "Latest values, side by side" : "Latest values"),
      table(
        "Latest values",
        ["metric", ...shown],
        keys.map((key) => [h("a", { href: address({ page: "metrics", run: context.run, filter: `^${key}$`, compare: shown[1] }) }, key), ...found.map((one) => cell(one.get(key)))]),
      ),
    );
  });

  return {
    changed(next) {
      state = next;
      drawList();
      drawRecipe();
      drawProcesses();
      drawValues();
    },
    news() {
      drawList();
      drawProcesses();
    },
  };
}
