// Overview: the verdict in words, the river, the time budget, reward and loss, and the ledger.

import { get, part } from "../api.js";
import { HELD, KEYS, stacked } from "../budget.js";
import { Chart } from "../chart.js";
import { color, h, replace } from "../dom.js";
import { ago, number, percent, seconds, whole } from "../format.js";
import { dam, drawRiver, parts } from "../river.js";
import { columns, histories, smoothed } from "../series.js";
import { to } from "../state.js";
import { Rates, pending, prose, shield, span, viewed, zoomed } from "./shared.js";

const WINDOW_STEPS = 20;
const SMOOTHING = 0.9;
const LATEST =
  "^(queue/(waiting|fill_frac|oldest_wait_s)/|rollout/(inflight|generated_tok_s|scorer_busy_frac|slots_busy_frac)$|" +
  "policy/served_version$|perf/(step_s|weight_sync_lag_s)$|batch/groups_per_step$)";

export function mount(main, context) {
  const verdict = h("section", { class: "card verdict", "aria-label": "Verdict" }, pending());
  const river = h("section", { class: "card river", "aria-label": "The river" }, pending());
  const ledger = h("section", { class: "card ledger", "aria-label": "Ledger" }, pending());
  const onZoom = (from, until) => zoomed(from, until);
  const link = (filter) => to("metrics", { filter });
  const about = (key) => context.catalogue.get(key)?.meaning ?? "";
  const budget = new Chart({ title: "Time budget of a step", about: about("perf/step_s"), unit: "s", href: to("time"), onZoom });
  const reward = new Chart({ title: "Reward", about: about("reward"), unit: "reward", href: link("^(reward|rewards/.*|eval/reward)$"), onZoom });
  const loss = new Chart({ title: "Loss", about: about("loss"), href: link("^loss$"), onZoom });
  const kl = new Chart({ title: "KL", about: about("kl"), unit: "nats", href: link("^kl"), onZoom });
  const charts = [budget, reward, loss, kl];
  const alerts = h("section", { class: "card alerts", "aria-label": "Firing alerts", "aria-live": "polite", hidden: true });
  main.append(
    h(
      "div",
      { class: "stack" },
      h("h1", { class: "visually-hidden" }, "Overview"),
      verdict,
      alerts,
      river,
      h("div", { class: "overview-charts" }, charts.map((each) => each.element)),
      ledger,
    ),
  );
  const rates = new Rates();
  let state = {};
  let judged = null;
  let flow = null;
  let working = false;
  let again = false;
  let open = false;
  let shownVerdict = "";
  const path = `/runs/${part(context.run)}`;

  async function work() {
    if (working) {
      again = true;
      return;
    }
    working = true;
    try {
      do {
        again = false;
        // What is dammed has the accent, also in the time budget.
        const judging = drawVerdict();
        await Promise.all([drawCurves(judging), drawFlow(), drawAlerts()]);
        drawWater();
        viewed();
      } while (again);
    } finally {
      working = false;
    }
  }

  const drawVerdict = shield(verdict, async () => {
    judged = await get(`${path}/verdict`, { window: WINDOW_STEPS });
    // What is being read or selected is left alone where nothing is new.
    const text = JSON.stringify(judged);
    if (text === shownVerdict && !verdict.querySelector(".problem")) return;
    shownVerdict = text;
    open = verdict.querySelector("details")?.open ?? open;
    replace(verdict, said(judged, open));
  });

  const drawAlerts = shield(alerts, async () => {
    const { firing } = await get(`${path}/alerts`, { limit: 0 });
    alerts.hidden = !firing.length;
    replace(
      alerts,
      firing.map((each) =>
        h("p", {}, h("span", { class: each.severity === "error" ? "failed" : "warned" }, h("a", { href: to("alerts") }, each.name)), " ", prose(each.sentence), h("span", { class: "quiet" }, ` ${ago(each.fired_at)}`)),
      ),
    );
  });

  const drawFlow = shield(river, async () => {
    const since = Math.max(0, (context.detail.latest_step ?? 0) - 50);
    const [metrics, account, served] = await Promise.all([
      get(`${path}/metrics`, { match: LATEST }),
      get(`${path}/ledger`),
      get(`${path}/metrics/policy/served_version`, { group_by: "producer", since, max_points: 100 }),
    ]);
    const values = new Map(metrics.metrics.map((each) => [each.key, each.value ?? null]));
    const latest = (key) => values.get(key) ?? null;
    rates.add(account, Date.now() / 1000);
    const [perStep, stepS] = [latest("batch/groups_per_step"), latest("perf/step_s")];
    const into = rates.into(perStep !== null && stepS ? perStep / stepS : null);
    flow = {
      parts: parts(latest, replicas(context.detail)),
      rates: into,
      fastest: Math.max(0, ...Object.values(into).filter((each) => each !== null)),
      policy: policy(served, latest("perf/weight_sync_lag_s")),
    };
    replace(ledger, balance(account));
  });

  function drawWater() {
    if (!flow || river.querySelector(".problem")) return;
    const focused = [...river.querySelectorAll("a")].indexOf(document.activeElement);
    drawRiver(river, { ...flow, dam: dam(judged) });
    river.dataset.live = context.flowing ? "live" : "";
    if (focused >= 0) river.querySelectorAll("a")[focused]?.focus({ preventScroll: true });
  }

  async function drawCurves(judging) {
    const view = { ...state, axis: state.axis ?? "step", maxPoints: 400 };
    try {
      const [found] = await Promise.all([histories([{ detail: context.detail, attempt: state.attempt }], [...KEYS, "reward", "eval/reward", "loss", "kl"], view), judging]);
      const of = (key) => {
        const each = found.find((one) => one.key === key);
        return columns(each.points, each.shift);
      };
      const options = { axis: view.axis, span: span(state) };
      const held = HELD[judged?.verdict];
      budget.draw(stacked(found.filter((each) => KEYS.includes(each.key)), held), { ...options, stacked: true, share: true });
      const curve = of("reward");
      const evaluated = of("eval/reward");
      const ink = () => color("ink");
      reward.draw(
        [
          { label: "reward", color: ink, x: curve.x, y: smoothed(curve.value, SMOOTHING), read: curve.value, faint: curve.value },
          ...(evaluated.x.length ? [{ label: "evaluation", color: () => color("cat-2"), x: evaluated.x, y: evaluated.value, dots: true }] : []),
        ],
        options,
      );
      for (const [chart, key] of [
        [loss, "loss"],
        [kl, "kl"],
      ]) {
        const table = of(key);
        chart.draw([{ label: key, color: ink, x: table.x, y: smoothed(table.value, SMOOTHING), read: table.value, faint: table.value }], options);
      }
    } catch (error) {
      if (error.status === undefined) throw error;
      for (const each of charts) each.empty(error.message);
    }
  }

  const observer = new ResizeObserver(() => drawWater());
  observer.observe(river);
  return {
    changed(next) {
      state = next;
      work();
    },
    news: work,
    destroy() {
      observer.disconnect();
      for (const each of charts) each.destroy();
    },
  };
}

function said(found, open) {
  const [name, ...rest] = found.sentence.split(": ");
  const words = rest.join(": ").split("; ");
  const about = [
    found.confidence ? `confidence ${found.confidence}` : null,
    found.num_steps ? `last ${found.num_steps} steps` : null,
    found.unaccounted_share === null ? null : `${percent(found.unaccounted_share)} of a step unaccounted for`,
  ].filter(Boolean);
  return [
    h(
      "p",
      { class: "said" },
      h("strong", {}, `${name[0].toUpperCase()}${name.slice(1)}.`),
      words.map((each) => ` ${each[0]?.toUpperCase() ?? ""}${each.slice(1)}.`).join(""),
    ),
    h("p", { class: "next" }, h("b", {}, "Next: "), prose(found.knob)),
    h("p", { class: "about" }, about.map((each) => h("span", {}, each))),
    h("details", { open }, h("summary", { id: "why" }, "Why"), evidence(found)),
    found.faults?.length
      ? h("ul", { class: "faults", "aria-label": "Faults" }, found.faults.map((each) => h("li", {}, h("span", { class: "warned" }, prose(each.sentence)), " ", prose(each.knob))))
      : null,
  ];
}

function evidence(found) {
  const rows = found.evidence.map((each) =>
    h(
      "tr",
      {},
      h("td", {}, h("a", { href: to("metrics", { filter: each.key.split(" + ").map((key) => `^${key}$`).join("|") }) }, each.key)),
      h("td", { class: "left quiet" }, each.measure),
      h("td", { title: each.value ?? "absent" }, number(each.value)),
      h("td", { class: "left" }, `${{ ">=": "≥", "<": "<", ">": ">" }[each.compare]} ${number(each.threshold)}`),
      h("td", { class: "left" }, each.holds ? "✓ holds" : "does not hold"),
    ),
  );
  const stages = found.stages;
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Evidence" },
    h("table", {}, h("thead", {}, h("tr", {}, ["metric", "measure", "value", "threshold", ""].map((each, at) => h("th", { scope: "col", class: at === 2 ? null : "left" }, each || h("span", { class: "visually-hidden" }, "holds"))))), h("tbody", {}, rows)),
    stages
      ? h("p", { class: "quiet" }, `For a step's groups, were they never to wait, training needs ${seconds(stages.training_s)}, generation ${seconds(stages.generation_s)}, scoring ${seconds(stages.scoring_s)}.`)
      : null,
    found.missing.length ? h("p", { class: "quiet" }, `Absent: ${found.missing.join(", ")}.`) : null,
  );
}

// Processes of each service that were heard of within a minute of the run's last word.
function replicas(detail) {
  const end = Date.parse(detail.last_seen);
  const counts = {};
  for (const each of detail.producers) {
    if (end - Date.parse(each.last_seen) <= 60_000) counts[each.service] = (counts[each.service] ?? 0) + 1;
  }
  return counts;
}

function policy(served, lag) {
  const lasts = Object.values(served.by_producer ?? {})
    .map((points) => points.filter((point) => point.value !== null).at(-1)?.value)
    .filter((each) => each !== undefined);
  if (!lasts.length) return "policy: no version is served yet";
  const newest = Math.max(...lasts);
  const same = lasts.filter((each) => each === newest).length;
  const text = `policy v${newest}: ${same} of ${lasts.length} ${lasts.length === 1 ? "replica serves" : "replicas serve"} it`;
  return lag === null ? text : `${text}, lag ${seconds(lag)}`;
}

function balance(account) {
  const terms = [
    ["trained", account.trained],
    ["rolled back", account.rolled_back],
    ["dropped", account.dropped],
    ["given up", account.given_up],
    ["in flight", account.in_flight],
  ].filter(([name, count]) => count || name === "trained" || name === "in flight");
  const oldest = account.oldest[0];
  return [
    h(
      "p",
      { class: "sum" },
      h("span", { class: "quiet" }, "ledger"),
      h("span", { "data-ledger": "dispatched" }, h("b", {}, whole(account.dispatched)), " groups dispatched ="),
      terms.map(([name, count], at) => h("span", {}, `${at ? "+ " : ""}`, h("b", {}, whole(count)), ` ${name}`)),
    ),
    account.balanced ? h("span", { class: "quiet" }, "✓ adds up") : h("span", { class: "failed" }, "does not add up"),
    h("span", { class: "spring" }),
    account.num_stuck ? h("a", { class: "warned", href: to("lineage") }, `${whole(account.num_stuck)} in flight for more than ${seconds(account.stuck_after_s)}`) : null,
    oldest ? h("span", { class: "quiet" }, "oldest ", h("a", { href: to("lineage", { item: oldest.group_id }) }, oldest.group_id), ` ${seconds(Math.round(oldest.age_s * 10) / 10)}`) : null,
  ];
}
