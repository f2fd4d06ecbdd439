// Alerts: what fires now, and what has fired.

import { get, part } from "../api.js";
import { h, replace } from "../dom.js";
import { ago, moment, seconds } from "../format.js";
import { to } from "../state.js";
import { absent, pending, prose, shield, table } from "./shared.js";

export function mount(main, context) {
  const firing = h("section", { class: "card", "aria-live": "polite" }, pending());
  const past = h("section", { class: "card" }, pending());
  main.append(h("h1", { class: "visually-hidden" }, "Alerts"), h("div", { class: "stack" }, firing, past));

  const draw = shield(firing, async () => {
    const found = await get(`/runs/${part(context.run)}/alerts`);
    const heads = ["alert", "what is wrong", "step", "fired", "lasted", "webhook"];
    replace(
      firing,
      h("h2", {}, found.firing.length ? `${found.firing.length} firing` : "Nothing fires"),
      found.firing.length ? table("Firing alerts", heads, found.firing.map(line), ["", "wrap"]) : h("p", { class: "empty" }, "All rules of the recipe's [alerts] hold."),
      found.failed_calls ? h("p", { class: "failed" }, `${found.failed_calls} calls of the webhook were given up.`) : null,
      found.pending_calls ? h("p", { class: "quiet" }, `${found.pending_calls} calls of the webhook are still to be made.`) : null,
    );
    replace(past, h("h2", {}, "Past"), found.past.length ? table("Past alerts", heads, found.past.map(line), ["", "wrap"]) : h("p", { class: "empty" }, "None has fired and ended."));
  });

  function line(each) {
    const end = each.ended_at ? Date.parse(each.ended_at) : Date.now();
    const told = Object.entries(each.told).map(([event, state]) => `${event}: ${state}`);
    return [
      h("span", { class: each.severity === "error" ? "failed" : "warned" }, each.name),
      h("span", {}, prose(each.sentence), each.ended_because ? h("span", { class: "quiet" }, ` Ended: ${each.ended_because}.`) : null),
      h("a", { href: to("lineage", { step: each.step }) }, String(each.step)),
      h("time", { datetime: each.fired_at, title: moment(each.fired_at) }, ago(each.fired_at)),
      seconds(Math.round((end - Date.parse(each.fired_at)) / 1000)),
      told.join(", ") || absent("no webhook is set in the recipe's [alerts], or it was not called for this one"),
    ];
  }

  return { changed: draw, news: draw };
}
