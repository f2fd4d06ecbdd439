// Lineage: from a row of the dataset to the optimizer step that it came to, and back.

import { get, part } from "../api.js";
import { h, replace } from "../dom.js";
import { moment, seconds, whole } from "../format.js";
import { change, to } from "../state.js";
import { absent, facts, pending, shield, table } from "./shared.js";

const STAGES = [
  ["wait_for_generator_s", "waits for a generator"],
  ["generation_s", "generation"],
  ["wait_for_scorer_s", "waits for a scorer"],
  ["scoring_s", "scoring"],
  ["wait_for_trainer_s", "waits for the trainer"],
];

const TERMINAL = new Set(["trained", "rolled_back", "dropped", "given_up"]);

export function mount(main, context) {
  const ask = h("form", { class: "tools", onsubmit: submitted });
  const account = h("section", { class: "card" }, pending());
  const answer = h("section", { class: "card", "aria-live": "polite", hidden: true });
  main.append(h("h1", { class: "visually-hidden" }, "Lineage"), ask, h("div", { class: "stack" }, answer, account));
  const path = `/runs/${part(context.run)}`;
  let state = {};

  const kind = h("select", { id: "kind", name: "kind" }, [
    ["step", "optimizer step"],
    ["row", "dataset row"],
    ["group", "group"],
  ].map(([value, title]) => h("option", { value }, title)));
  const text = h("input", { id: "what", type: "search", name: "what", placeholder: "812, or 0.17.1.1" });
  ask.append(h("label", {}, "follow", kind), h("label", {}, h("span", { class: "visually-hidden" }, "which"), text), h("button", {}, "Show"));

  function submitted(event) {
    event.preventDefault();
    const value = text.value.trim();
    change({ item: null, step: null, row: null, [kind.value === "group" ? "item" : kind.value]: value || null });
  }

  const drawAnswer = shield(answer, async () => {
    const { item, step, row } = state;
    answer.hidden = !(item ?? step ?? row);
    if (answer.hidden) return;
    replace(answer, pending());
    if (item) replace(answer, ...way(await get(`${path}/groups/${part(item)}`)));
    else if (step !== undefined) replace(answer, ...listed(await get(`${path}/steps/${part(step)}`), `Step ${step} trained`));
    else replace(answer, ...listed(await get(`${path}/rows/${part(row)}`), `Row ${row} was dispatched in`));
  });

  const drawAccount = shield(account, async () => {
    const found = await get(`${path}/ledger`);
    const reasons = (name, all) => Object.entries(all).map(([reason, count]) => [`${name}: ${reason}`, whole(count)]);
    replace(
      account,
      h("h2", {}, "Where all groups are"),
      facts([
        ["dispatched", whole(found.dispatched)],
        ["trained", whole(found.trained)],
        ["rolled back", whole(found.rolled_back)],
        ["dropped", whole(found.dropped)],
        ...reasons("dropped", found.dropped_reasons),
        ["given up", whole(found.given_up)],
        ...reasons("given up", found.given_up_reasons),
        ["in flight", whole(found.in_flight)],
        ...Object.entries(found.states).filter(([name, count]) => count && !TERMINAL.has(name)).map(([name, count]) => [`in flight: ${name}`, whole(count)]),
        ["balance", found.balanced ? "adds up" : "does not add up: a group is counted that is not there"],
      ]),
      h("h2", { class: "spaced" }, "In flight for longest"),
      found.oldest.length
        ? table(
            "In flight for longest",
            ["group", "row", "state", "since", "age", "held by"],
            found.oldest.map((each) => [
              group(each.group_id),
              row(each.row_index),
              each.state,
              seconds(Math.round(each.in_state_s)),
              h("span", { class: each.age_s > found.stuck_after_s ? "warned" : null }, seconds(Math.round(each.age_s))),
              each.holder ?? "a stream",
            ]),
          )
        : h("p", { class: "empty" }, "No group is in flight."),
    );
  });

  function group(id) {
    return h("a", { class: "mono", href: to("lineage", { item: id }) }, id);
  }

  function row(index) {
    return h("a", { href: to("lineage", { row: index }) }, String(index));
  }

  function listed(found, words) {
    return [
      h("h2", {}, `${words} ${whole(found.num_groups)} ${found.num_groups === 1 ? "group" : "groups"}`),
      found.step !== undefined ? h("p", {}, h("a", { href: to("rollouts", { step: found.step }) }, "Conversations of this step")) : null,
      table(
        words,
        ["group", "row", "epoch", "attempt", "try", "state", "step", "reason"],
        found.groups.map((each) => [
          group(each.group_id),
          row(each.row_index),
          each.epoch,
          each.attempt,
          each.try_number,
          each.state.replaceAll("_", " "),
          each.step === null ? absent("no optimizer step has trained it") : h("a", { href: to("lineage", { step: each.step }) }, String(each.step)),
          each.reason || "",
        ]),
      ),
    ].filter(Boolean);
  }

  function way(found) {
    const known = STAGES.map(([key, title]) => [title, found.stages[key]]);
    const ways = known.map(([title, value]) => {
      const cell = h("div", { class: value === null ? "missing" : null }, h("b", {}, seconds(value)), h("br"), h("span", { class: "quiet" }, title));
      cell.style.flexGrow = String(1 + 6 * (found.total_s ? (value ?? 0) / found.total_s : 0));
      return cell;
    });
    return [
      h("h2", {}, "Group ", h("span", { class: "mono" }, found.group_id)),
      h(
        "p",
        {},
        `${found.state.replaceAll("_", " ")}${found.reason ? ` (${found.reason})` : ""}`,
        found.step === null ? "" : [", step ", h("a", { href: to("lineage", { step: found.step }) }, String(found.step))],
        ", of row ",
        row(found.row_index),
        found.total_s === null ? ", in flight" : `, after ${seconds(found.total_s)}`,
        found.step === null ? "" : [" · ", h("a", { href: to("rollouts", { step: found.step }) }, "conversations of that step")],
      ),
      h("div", { class: "way" }, ways),
      table(
        "What was said of the group",
        ["state", "at", "by", "again"],
        found.events.map((each) => [
          each.state.replaceAll("_", " "),
          h("time", { datetime: each.at }, moment(each.at)),
          each.worker || absent("the event does not say by whom"),
          each.again_at ? `${moment(each.again_at)}${each.again_worker ? ` by ${each.again_worker}` : ""}` : "",
        ]),
      ),
    ];
  }

  return {
    changed(next) {
      state = next;
      const { item, step, row: index } = state;
      kind.value = item ? "group" : index !== undefined ? "row" : "step";
      text.value = item ?? step ?? index ?? "";
      drawAnswer();
      drawAccount();
    },
    news: drawAccount,
  };
}
