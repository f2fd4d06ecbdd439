// Rollouts: traced conversations, to be read like conversations.

import { get, part } from "../api.js";
import { h, replace } from "../dom.js";
import { ago, moment, number, seconds, whole } from "../format.js";
import { change, to } from "../state.js";
import { absent, facts, pending, shield } from "./shared.js";

const FILTERS = ["version", "step", "function", "reward_min", "reward_max", "tool", "end"];
const ENDS = ["stop", "length", "context", "turns", "time"];
const OPEN_TOKENS = 600; // a longer sequence is unfolded on demand
const UNLIKELY = -6; // natural logarithm: a token of 0.25 % has all of the colour

export function mount(main, context) {
  const form = h("form", { class: "tools", onsubmit: (event) => event.preventDefault() });
  const list = h("section", { class: "card rollout-list", "aria-label": "Traced conversations" }, pending());
  const detail = h("section", { class: "card rollout", "aria-live": "polite" });
  main.append(h("h1", { class: "visually-hidden" }, "Rollouts"), form, h("div", { class: "rollouts" }, list, detail));
  const path = `/runs/${part(context.run)}`;
  let state = {};
  let asked = null;
  let found = [];
  let next = null;
  let turn = 0;

  const chosen = (from) => Object.fromEntries(FILTERS.map((name) => [name, from[name]]));

  const load = shield(list, async (more = false) => {
    const mine = ++turn;
    const answer = await get(`${path}/rollouts`, { ...chosen(state), page_token: more ? next : null });
    if (mine !== turn) return;
    found = more ? [...found, ...answer.rollouts] : answer.rollouts;
    next = answer.next_page_token;
    drawList();
  });

  function drawList() {
    const filtered = FILTERS.some((name) => state[name]);
    replace(
      list,
      found.length
        ? h("ol", {}, found.map((each) => h("li", {}, entry(each))))
        : h(
            "p",
            { class: "empty" },
            filtered ? "No traced conversation matches the filter." : ["No conversation of this run is traced. ", h("code", {}, "[traces]"), " in the recipe says how many are."],
          ),
      next ? h("button", { id: "more", onclick: () => load(true) }, "Earlier ones") : null,
    );
  }

  function entry(each) {
    return h(
      "a",
      { id: `rollout-${each.rollout_id}`, href: to("rollouts", { ...chosen(state), item: each.rollout_id }), "aria-current": each.rollout_id === state.item ? "true" : null },
      h("b", {}, number(each.reward)),
      h("span", { class: "mono" }, each.rollout_id),
      h("span", { class: "quiet" }, `v${each.version}${each.step === null ? "" : `, step ${each.step}`} · ${each.num_turns} ${each.num_turns === 1 ? "turn" : "turns"} · ${each.end} · ${ago(each.at)}`),
    );
  }

  const drawDetail = shield(detail, async () => {
    if (!state.item) {
      replace(detail, h("p", { class: "empty" }, "Choose a conversation."));
      return;
    }
    const item = state.item;
    const one = await get(`${path}/rollouts/${item.split("/").map(part).join("/")}`);
    if (item === state.item) replace(detail, ...conversation(one));
  });

  function step(by) {
    const at = found.findIndex((each) => each.rollout_id === state.item);
    const other = found[at + by];
    return other
      ? h("a", { id: by < 0 ? "newer" : "older", href: to("rollouts", { ...chosen(state), item: other.rollout_id }) }, by < 0 ? "← newer" : "older →")
      : h("span", { class: "quiet" }, by < 0 ? "← newer" : "older →");
  }

  function conversation(one) {
    return [
      h("header", { class: "tools" }, h("h2", { class: "mono" }, one.rollout_id), step(-1), step(1)),
      h(
        "p",
        { class: "chips" },
        h("span", { class: "chip" }, "reward ", h("b", {}, number(one.reward))),
        Object.entries(one.rewards).map(([name, value]) => h("span", { class: "chip", title: value === null ? "it abstained" : String(value) }, `${name} `, h("b", {}, number(value)))),
        h("span", { class: "chip", title: String(one.advantage) }, "advantage ", h("b", {}, number(one.advantage))),
        one.environment_reward === null ? null : h("span", { class: "chip" }, `${one.environment} `, h("b", {}, number(one.environment_reward))),
      ),
      facts([
        ["group", h("a", { class: "mono", href: to("lineage", { item: one.group_id }) }, one.group_id)],
        ["row", h("a", { href: to("lineage", { row: one.row_index }) }, String(one.row_index))],
        ["policy", one.version === one.newest_version ? `v${one.version}` : `v${one.version} to v${one.newest_version}`],
        ["state", one.state ? [one.state.replaceAll("_", " "), one.reason ? ` (${one.reason})` : "", one.step === null ? "" : [", step ", h("a", { href: to("lineage", { step: one.step }) }, String(one.step))]] : absent("nothing was said of its group yet")],
        ["ended", `${one.end}, after ${seconds(one.duration_s)} (tools ${seconds(one.tool_s)}, environment ${seconds(one.env_s)})`],
        ["tokens", `${whole(one.num_generated_tokens)} generated, ${whole(one.num_trained_tokens)} trained`],
        ["by", `${one.generator}, scored by ${one.scorer}, ${moment(one.at)}`],
      ]),
      one.prompt.map(message),
      h("hr", { class: "sampled", "aria-label": "From here on it is the policy's" }),
      one.completion.map(message),
      one.sequences.map((each, at) => tokens(each, at, one.sequences.length)),
    ].flat();
  }

  function message(each) {
    return h(
      "div",
      { class: "message", data: { role: each.role } },
      h("p", { class: "role" }, each.name ? `${each.role} · ${each.name}` : each.role),
      each.reasoning ? h("details", { class: "fold" }, h("summary", {}, "reasoning"), h("pre", {}, each.reasoning)) : null,
      each.content ? h("pre", {}, each.content) : null,
      each.tool_calls.map((call) => h("details", { class: "fold" }, h("summary", {}, `calls ${call.name}`), h("pre", { class: "mono" }, indented(call.arguments_json)))),
    );
  }

  function tokens(sequence, at, count) {
    const body = h("pre", { class: "tokens" });
    const shades = h("button", { class: "small", "aria-pressed": "false", title: "The less likely a token was, the darker it stands out" }, "by log-probability");
    let shaded = false;
    const fill = () =>
      body.replaceChildren(
        ...sequence.texts.map((text, index) => {
          const logprob = sequence.logprobs[index];
          if (!sequence.trained[index]) return h("span", { class: "context" }, text);
          const token = h("span", { class: "trained", title: `token ${sequence.token_ids[index]}, log-probability ${logprob === null ? "—" : logprob.toFixed(3)}` }, text);
          if (shaded && logprob !== null) {
            token.classList.add("shaded");
            token.style.setProperty("--doubt", `${Math.round(100 * Math.min(1, logprob / UNLIKELY))}%`);
          }
          return token;
        }),
      );
    shades.addEventListener("click", () => {
      shaded = !shaded;
      shades.setAttribute("aria-pressed", String(shaded));
      fill();
    });
    const title = count > 1 ? `tokens, sequence ${at + 1} of ${count}` : "tokens";
    const spans = sequence.spans.map((span) => `v${span.version}: ${span.start} to ${span.end}`).join(", ");
    return h(
      "details",
      { class: "fold", open: count === 1 && sequence.texts.length <= OPEN_TOKENS, ontoggle: (event) => event.target.open && !body.firstChild && fill() },
      h("summary", {}, `${title}: ${whole(sequence.texts.length)}, trained ones are underlined`),
      h("p", { class: "quiet" }, spans ? `sampled by ${spans} ` : "", shades),
      body,
    );
  }

  function drawForm() {
    const field = (name, label, type = "text", size = 7) =>
      h("label", {}, label, h("input", { id: `filter-${name}`, type, size, step: "any", value: state[name] ?? "", onchange: (event) => change({ [name]: event.target.value.trim() }) }));
    const end = h("select", { id: "filter-end", onchange: (event) => change({ end: event.target.value }) }, h("option", { value: "" }, "any end"), ENDS.map((each) => h("option", { value: each }, each)));
    end.value = state.end ?? "";
    end.setAttribute("aria-label", "How it ended");
    replace(
      form,
      field("version", "version", "number"),
      field("step", "step", "number"),
      field("function", "reward function", "text", 10),
      field("reward_min", "reward from", "number"),
      field("reward_max", "to", "number"),
      field("tool", "tool", "text", 10),
      end,
      FILTERS.some((name) => state[name]) ? h("button", { id: "clear", type: "button", onclick: () => change(Object.fromEntries(FILTERS.map((name) => [name, null]))) }, "Clear") : null,
    );
  }

  // j and k, as in a reader of mail: the next one and the one before.
  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    const by = { j: 1, k: -1 }[event.key];
    if (!by) return;
    const other = state.item ? found[found.findIndex((each) => each.rollout_id === state.item) + by] : found[0];
    if (other) location.hash = to("rollouts", { ...chosen(state), item: other.rollout_id });
  }
  addEventListener("keydown", keys);

  return {
    destroy: () => removeEventListener("keydown", keys),
    async changed(to_) {
      state = to_;
      drawForm();
      const wish = JSON.stringify(chosen(state));
      if (wish !== asked) {
        asked = wish;
        await load();
      } else {
        drawList();
      }
      await drawDetail();
    },
    // Newer ones come in above, unless earlier ones were asked for: what is read does not move.
    news: () => (found.length <= 50 ? load() : null),
  };
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // as the model wrote it
  }
}
