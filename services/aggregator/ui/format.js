// Numbers and times as people read them: at most three significant digits, a unit, and an em dash
// for what is absent. `exact` has all digits, for a title.

export const ABSENT = "—";

const LARGE = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

// 0.61349 -> "0.613", 25984 -> "26.0k", 1999 -> "2.00k", 0 -> "0", null -> "—".
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return ABSENT;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return minus(value.toExponential(2).replace(/\.?0+e/, "e"));
  if (Number.isInteger(value) && size < 1000) return minus(String(value));
  for (const [unit, letter] of LARGE) {
    if (size >= unit * 0.9995) return minus(`${digits(value / unit)}${letter}`);
  }
  return minus(digits(value));
}

// Counts are exact: 26098 -> "26,098".
export function whole(value) {
  return value === null || value === undefined ? ABSENT : minus(value.toLocaleString("en-US"));
}

// A share, to a hundredth of what is whole: 0.613 -> "61 %", 0.0114 -> "1.1 %".
export function percent(value) {
  if (value === null || value === undefined) return ABSENT;
  const hundredths = value * 100;
  if (hundredths === 0) return "0 %";
  return minus(`${Math.abs(hundredths) >= 9.95 ? Math.round(hundredths) : Number(hundredths.toPrecision(2))} %`);
}

// Seconds: 0.0042 -> "4.2 ms", 1.94 -> "1.94 s", 75 -> "1 min 15 s", 8000 -> "2 h 13 min".
export function seconds(value) {
  if (value === null || value === undefined) return ABSENT;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${number(value * 1e6)} µs`;
  if (size < 0.9995) return `${number(value * 1e3)} ms`;
  if (size < 59.95) return `${number(value)} s`;
  const rounded = Math.round(value);
  if (size < 3600) return both(rounded, 60, "min", 1, "s");
  if (size < 86400) return both(rounded, 3600, "h", 60, "min");
  return both(rounded, 86400, "d", 3600, "h");
}

// both(75, 60, "min", 1, "s") -> "1 min 15 s"; both(120, ...) -> "2 min".
function both(value, large, largeUnit, small, smallUnit) {
  const sign = value < 0 ? "−" : "";
  const size = Math.abs(value);
  const rest = Math.floor((size % large) / small);
  return `${sign}${Math.floor(size / large)} ${largeUnit}${rest ? ` ${rest} ${smallUnit}` : ""}`;
}

// A value with the unit that the API names: "1" is a plain number.
export function measured(value, unit) {
  if (value === null || value === undefined) return ABSENT;
  if (unit === "s") return seconds(value);
  if (unit === "1" || unit === "reward" || !unit) return number(value);
  return `${number(value)} ${unit}`;
}

// All digits and the unit, or why there are none.
export function exact(value, unit = "") {
  if (value === null || value === undefined) return "nothing was observed";
  return unit && unit !== "1" ? `${value} ${unit}` : String(value);
}

// "4 s ago"; `now` in milliseconds.
export function ago(iso, now = Date.now()) {
  const past = (now - Date.parse(iso)) / 1000;
  return past < 1 ? "now" : `${seconds(Math.floor(past))} ago`;
}

// In the reader's zone.
export function moment(iso) {
  return new Date(iso).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

function digits(value) {
  const text = value.toPrecision(3);
  return text.includes("e") ? String(Math.round(value)) : text;
}

function minus(text) {
  return text.replace("-", "−");
}
