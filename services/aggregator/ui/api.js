// Questions to the API: the token where one is wanted, errors in the API's own words.

const TOKEN = "headrace.token";
let asking = null;

// What went wrong, in words for people; `status` 0 where the server was not reached.
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

// GET a path below /api/v1 and return its JSON. `query` takes lists: {run: ["a", "b"]}.
// A 401 asks the reader for a token once and tries again.
export async function get(path, query = {}, { signal } = {}) {
  const response = await ask(path, query, { signal });
  return response.json();
}

// The response itself, for streams. Throws Problem for what is not 2xx.
export async function ask(path, query = {}, { signal, headers = {} } = {}) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    let response;
    try {
      response = await fetch(url(path, query), {
        signal,
        headers: { ...headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) },
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(0, "The aggregator does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      await renewed(token);
      continue;
    }
    throw new Problem(response.status, await detail(response));
  }
}

export function url(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") parameters.append(name, each);
    }
  }
  const text = parameters.toString();
  return `api/v1${path}${text ? `?${text}` : ""}`;
}

// A part of a path: a run's or a group's name.
export function part(text) {
  return encodeURIComponent(text);
}

async function detail(response) {
  try {
    return (await response.json()).detail ?? response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`; // not ours: a proxy's own page
  }
}

// Ask for a token, once for all questions that wait; `refused` is the one that was not taken.
async function renewed(refused) {
  if (sessionStorage.getItem(TOKEN) !== refused) return;
  asking ??= dialog(refused !== null).finally(() => (asking = null));
  await asking;
}

function dialog(wrong) {
  return new Promise((resolve) => {
    const box = document.createElement("dialog");
    box.className = "dialog";
    const form = document.createElement("form");
    form.method = "dialog";
    const label = document.createElement("label");
    label.textContent = wrong ? "That token was not accepted. Token:" : "This aggregator wants a token:";
    const input = document.createElement("input");
    input.type = "password";
    input.autocomplete = "off";
    input.required = true;
    const about = document.createElement("p");
    about.className = "quiet";
    about.textContent = "The token of network.token_file in the recipe. It is kept until this tab is closed.";
    const button = document.createElement("button");
    button.textContent = "Continue";
    label.append(input);
    form.append(label, about, button);
    box.append(form);
    document.body.append(box);
    form.addEventListener("submit", (event) => {
      event.preventDefault(); // the policy lets no form go anywhere
      sessionStorage.setItem(TOKEN, input.value.trim());
      box.remove();
      resolve();
    });
    box.addEventListener("cancel", (event) => event.preventDefault());
    box.showModal();
  });
}
