// What is shown is in the address: #/metrics?run=demo&axis=time. A link shows a colleague the same.

const listeners = new Set();

// {page: "metrics", run: "demo", axis: "time"}; what is not there is undefined.
export function current() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/").map(decodeURIComponent);
  return { ...Object.fromEntries(new URLSearchParams(query)), page: page || "overview", item: rest.join("/") || undefined };
}

// The address of a state: what is null, undefined or "" is left out.
export function address(state) {
  const { page, item, ...others } = state;
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(others).sort()) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const path = item ? `${page}/${encodeURIComponent(item)}` : page;
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

// The address of another page with the same run, attempt and axis.
export function to(page, changes = {}) {
  const { run, attempt, axis } = current();
  return address({ page, run, attempt, axis, ...changes });
}

// Change some of it. `quiet` replaces the entry of the browser's history: a slider makes no trail.
export function change(changes, { quiet = false } = {}) {
  const target = address({ ...current(), ...changes });
  if (target === location.hash) return;
  if (quiet) {
    history.replaceState(null, "", target);
    tell();
  } else {
    location.hash = target;
  }
}

export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell() {
  for (const listener of [...listeners]) listener(current());
}

addEventListener("hashchange", tell);
