// The river: a run as water that flows from the dataset to the optimizer. Widths of channels follow
// groups a second, basins fill with their queues, and the dam stands where the flow is held.

import { s } from "./dom.js";
import { ABSENT, number, percent, seconds, whole } from "./format.js";
import { to } from "./state.js";

const WIDE = 680;
const DEEP = 64;
const THICK = 26;

// Where each verdict's dam stands: before this part, or on the policy's way back.
const DAMS = {
  "environment-bound": "generators",
  "generation-bound": "generators",
  "scoring-bound": "scorers",
  "straggler-bound": "trainer",
  "pacing-bound": "requests",
  "sync-bound": "policy",
  "training-bound": "trainer",
};

// Draw into `host`. `flow`: parts (see parts()), rates (groups a second into each part, by name;
// null where not known), policy (a sentence), dam ({at, share} or null).
export function drawRiver(host, flow) {
  const width = Math.max(260, host.clientWidth - 16);
  host.replaceChildren(width >= WIDE ? across(flow, width) : down(flow, width));
}

// Where the flow is held, from a verdict: {at, share}, or null.
export function dam(verdict) {
  const at = DAMS[verdict?.verdict];
  return at ? { at, share: verdict.share } : null;
}

// What the river is made of. `latest`: values of metrics by key; `replicas`: numbers by service.
export function parts(latest, replicas) {
  const queue = (name, title, about) => {
    const waiting = latest(`queue/waiting/${name}`);
    const fill = latest(`queue/fill_frac/${name}`);
    const oldest = latest(`queue/oldest_wait_s/${name}`);
    return {
      name,
      title,
      kind: "basin",
      fill,
      says: [
        waiting === null ? ABSENT : `${whole(Math.round(waiting))} waiting`,
        fill !== null && fill >= 0.005 ? `${percent(fill)} full` : oldest ? `oldest ${seconds(oldest)}` : "",
      ],
      href: to("metrics", { filter: `^queue/.*/${name}$`, split: null }),
      about,
    };
  };
  const stage = (name, title, service, says, filter, about) => ({
    name,
    title: `${title}${replicas[service] === undefined ? "" : ` ${replicas[service]}`}`,
    kind: "stage",
    says,
    href: to("metrics", { filter, split: "1" }),
    about,
  });
  const inflight = latest("rollout/inflight");
  const speed = latest("rollout/generated_tok_s");
  const busy = latest("rollout/scorer_busy_frac");
  const step = latest("perf/step_s");
  const slots = latest("rollout/slots_busy_frac");
  return [
    { name: "dataset", title: "dataset", kind: "source", says: [], href: to("lineage"), about: "rows of the dataset" },
    queue("requests", "requests", "requests that wait for a generator"),
    stage(
      "generators",
      "generators",
      "generator",
      [
        inflight === null ? ABSENT : `${number(inflight)} in flight`,
        speed !== null ? `${number(speed)} tok/s` : slots !== null ? `${percent(slots)} busy` : "",
      ],
      "^(rollout/(inflight|slots|generated|duration|engine|tool|env)|completions/)",
      "conversations are held here",
    ),
    queue("groups", "groups", "groups that wait for a scorer"),
    stage(
      "scorers",
      "scorers",
      "scorer",
      [busy === null ? ABSENT : `${percent(busy)} busy`],
      "^(rollout/scor|reward)",
      "rewards are computed here",
    ),
    queue("samples", "samples", "groups that wait for the trainer"),
    stage("trainer", "trainer", "none", [step === null ? ABSENT : `${seconds(step)} a step`], "^(perf|batch)/", "the policy is trained here"),
  ];
}

function across(flow, width) {
  const { parts: all, rates } = flow;
  const source = 72;
  const basin = Math.min(112, Math.max(70, width * 0.085));
  const stage = Math.min(160, Math.max(96, width * 0.125));
  const sizes = all.map((each) => (each.kind === "source" ? source : each.kind === "basin" ? basin : stage));
  const gap = (width - sizes.reduce((sum, each) => sum + each, 0) - 4) / (all.length - 1);
  const top = 34;
  const middle = top + DEEP / 2;
  const height = 182;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "The flow of groups from the dataset to the trainer" });
  const places = [];
  let x = 2;
  all.forEach((part, index) => {
    places.push({ x, width: sizes[index], middle: x + sizes[index] / 2 });
    x += sizes[index] + gap;
  });
  all.forEach((part, index) => {
    if (index === 0) return;
    const from = places[index - 1].x + places[index - 1].width;
    svg.append(...channel(from, middle, places[index].x, middle, rates[part.name], flow.fastest));
    if (rates[part.name] !== null && rates[part.name] !== undefined && gap > 62) {
      svg.append(s("text", { x: (from + places[index].x) / 2, y: middle - THICK / 2 - 6, "text-anchor": "middle", class: "small" }, `${number(rates[part.name])}/s`));
    }
  });
  all.forEach((part, index) => {
    const at = places[index];
    svg.append(
      link(part, [
        body(part, at.x, top, at.width, flow.dam?.at === part.name),
        s("text", { x: at.middle, y: part.kind === "basin" ? top - 12 : middle + 4, "text-anchor": "middle", class: "name" }, part.title),
        ...part.says.map((each, line) => s("text", { x: at.middle, y: top + DEEP + 18 + line * 16, "text-anchor": "middle", class: "small" }, each)),
      ]),
    );
    // Above a basin stands its name: there the dam's words end before it.
    if (flow.dam?.at === part.name) svg.append(...barrier(at.x - 5, top - 10, DEEP + 20, flow.dam, part.kind === "basin"));
  });
  svg.append(s("text", { x: 2, y: height - 14, class: "small" }, "channels: groups per second"));
  const back = height - 14;
  const [from, until] = [places[6].middle, places[2].middle];
  const text = flow.policy;
  const held = flow.dam?.at === "policy";
  const room = text.length * 6.6 + 24;
  const center = (from + until) / 2;
  const upper = top + DEEP + 46;
  svg.append(
    s("path", { class: held ? "policy dammed" : "policy", d: `M${from} ${upper - 16}V${back - 4}H${center + room / 2}M${center - room / 2} ${back - 4}H${until}V${upper}` }),
    s("path", { class: held ? "dam" : "arrow", d: `M${until} ${upper - 8}l-5 9h10z` }),
    s("text", { x: center, y: back, "text-anchor": "middle", class: held ? "dam-text" : "small" }, text),
  );
  return svg;
}

function down(flow, width) {
  const { parts: all, rates } = flow;
  const row = 62;
  const body_ = 112;
  const height = all.length * row + 30;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "The flow of groups from the dataset to the trainer" });
  all.forEach((part, index) => {
    const y = index * row + 6;
    if (index === 0) return;
    const rate = rates[part.name];
    svg.append(...channel(2 + body_ / 2, y - 24, 2 + body_ / 2, y, rate, flow.fastest));
    if (rate !== null && rate !== undefined) svg.append(s("text", { x: 2 + body_ / 2 + THICK / 2 + 5, y: y - 8, class: "small" }, `${number(rate)}/s`));
  });
  all.forEach((part, index) => {
    const y = index * row + 6;
    const basin = part.kind === "basin";
    const dammed = flow.dam?.at === part.name;
    svg.append(
      link(part, [
        body(part, 2, y, body_, dammed, 38),
        s("text", { x: 2 + body_ / 2, y: y + 24, "text-anchor": "middle", class: "name" }, part.title),
        s("text", { x: body_ + 16, y: y + 24, class: "small" }, part.says.filter(Boolean).join(" · ") || (basin ? ABSENT : "")),
      ]),
    );
    if (dammed) {
      svg.append(
        s("rect", { class: "dam", x: 0, y: y - 5, width: body_ + 4, height: 5, rx: 2 }),
        s("text", { x: body_ + 16, y: y + 3, class: "dam-text" }, damText(flow.dam)),
      );
    }
  });
  svg.append(
    s("text", { x: body_ + 16, y: 30, class: "small" }, "channels: groups per second"),
    s("text", { x: 2, y: height - 8, class: flow.dam?.at === "policy" ? "dam-text" : "small" }, flow.policy),
  );
  return svg;
}

function link(part, children) {
  const said = [part.title, ...part.says].filter(Boolean).join(", ");
  const unknown = part.says.includes(ABSENT) ? `; ${ABSENT} is what no process has reported yet` : "";
  const about = `${said}: ${part.about}${unknown}`;
  return s("a", { href: part.href, "aria-label": about }, s("title", {}, about), children);
}

function body(part, x, y, width, dammed, deep = DEEP) {
  if (part.kind === "source") return s("path", { class: "stage", d: `M${x + 6} ${y + deep / 2 - 18}h${width - 6}v36h${6 - width}q-6 -18 0 -36` });
  if (part.kind === "stage") return s("rect", { class: dammed ? "stage dammed" : "stage", x, y, width, height: deep, rx: 7 });
  const level = Math.max(0, Math.min(1, part.fill ?? 0)) * (deep - 2);
  return s(
    "g",
    {},
    s("rect", { class: "water", x: x + 1, y: y + deep - 1 - level, width: width - 2, height: level, rx: 3 }),
    s("path", { class: "basin", d: `M${x} ${y}v${deep - 6}q0 6 6 6h${width - 12}q6 0 6 -6v${6 - deep}` }),
  );
}

function channel(x0, y0, x1, y1, rate, fastest) {
  const known = rate !== null && rate !== undefined && fastest > 0;
  const thick = known ? Math.max(2, THICK * Math.sqrt(rate / fastest)) : 2;
  const upright = x0 === x1;
  const water = upright
    ? { x: x0 - thick / 2, y: y0, width: thick, height: y1 - y0 }
    : { x: x0, y: y0 - thick / 2, width: x1 - x0, height: thick };
  const drawn = [s("rect", { class: "water", ...water })];
  if (known && rate > 0) drawn.push(s("path", { class: "current", d: upright ? `M${x0} ${y1 - 3}V${y0 + 3}` : `M${x1 - 4} ${y0}H${x0 + 4}` }));
  return drawn;
}

function barrier(x, y, height, held, beside) {
  return [
    s("rect", { class: "dam", x, y, width: 6, height, rx: 2 }),
    s("text", { x: beside ? x + 6 : x + 3, y: y - 6, "text-anchor": beside ? "end" : "middle", class: "dam-text" }, damText(held)),
  ];
}

function damText(held) {
  return held.share === null ? "held here" : `holds ${percent(held.share)}`;
}
