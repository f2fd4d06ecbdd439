// Recipes: what a run was started with, what has changed since, and how two runs differ.

import { h } from "../dom.js";
import { ago, moment } from "../format.js";
import { absent, table } from "./shared.js";

const NONE = "No recipe of this run is known: an aggregator keeps that of its own run, from its start on, and not of others that send to it.";

// The card of one run, or of two side by side. `answers` are those of /runs/{run}/recipes.
export function recipeCard(answers, { all, toggle }) {
  const latest = answers.map((answer) => answer.recipes[0] ?? null);
  const [mine, other] = answers;
  if (!other) return one(mine, latest[0], all, toggle);
  if (latest.some((each) => each === null)) {
    const without = answers.filter((answer) => !answer.recipes.length).map((answer) => answer.run);
    return [h("h2", {}, "Recipes"), h("p", { class: "empty" }, `${without.join(" and ")}: ${NONE[0].toLowerCase()}${NONE.slice(1)}`)];
  }
  return two(mine.run, other.run, latest, all, toggle);
}

function one(answer, recipe, all, toggle) {
  if (!recipe) return [h("h2", {}, "Recipe"), h("p", { class: "empty" }, NONE)];
  const given = new Set(recipe.given);
  const keys = Object.keys(recipe.values).filter((key) => all || given.has(key));
  return [
    h("h2", {}, `Recipe of ${answer.run}`),
    h("div", { class: "tools" }, h("span", { class: "quiet" }, `${recipe.given.length} values given, the others are defaults; since `, time(recipe.since)), toggle("defaults, too")),
    table(`Recipe of ${answer.run}`, all ? ["key", "value", ""] : ["key", "value"], keys.map((key) => [code(key), value(recipe.values[key]), ...(all ? [given.has(key) ? "given" : h("span", { class: "quiet" }, "default")] : [])]), ["", "wrap", ""]),
    ...changes(answer.recipes),
  ];
}

function two(mine, other, [left, right], all, toggle) {
  const keys = [...new Set([...Object.keys(left.values), ...Object.keys(right.values)])].sort();
  const differ = keys.filter((key) => !same(left.values[key], right.values[key]));
  const shown = all ? keys : differ;
  const marked = new Set(differ);
  const built = table(`Recipes of ${mine} and ${other}`, ["key", mine, other], shown.map((key) => [code(key), value(left.values[key]), value(right.values[key])]), ["", "wrap", "wrap"]);
  built.querySelectorAll("tbody tr").forEach((row, at) => {
    if (all && marked.has(shown[at])) row.className = "differs";
  });
  return [
    h("h2", {}, "Recipes, side by side"),
    h("div", { class: "tools" }, h("span", { class: "quiet" }, differ.length ? `${differ.length} of ${keys.length} values differ` : `All ${keys.length} values are the same`), toggle("those that are the same, too")),
    shown.length ? built : null,
  ];
}

// Which values each later start changed, the latest first.
function changes(recipes) {
  const rows = recipes.slice(0, -1).flatMap((later, at) => {
    const before = recipes[at + 1];
    const keys = [...new Set([...Object.keys(later.values), ...Object.keys(before.values)])].sort();
    return keys.filter((key) => !same(later.values[key], before.values[key])).map((key) => [time(later.since), code(key), value(before.values[key]), value(later.values[key])]);
  });
  return rows.length ? [h("h3", { class: "spaced" }, "Changed since it began"), table("Changes of the recipe", ["when", "key", "before", "after"], rows, ["left", "", "wrap", "wrap"])] : [];
}

function same(a, b) {
  return JSON.stringify(a) === JSON.stringify(b);
}

function code(key) {
  return h("code", {}, key);
}

function value(found) {
  if (found === undefined) return absent("this recipe has no value for it");
  if (typeof found === "string") return h("code", {}, found || '""');
  const small = typeof found === "number" && found !== 0 && Math.abs(found) < 1e-3;
  return h("code", {}, small ? found.toExponential() : JSON.stringify(found));
}

function time(iso) {
  return h("time", { datetime: iso, title: moment(iso) }, ago(iso));
}
