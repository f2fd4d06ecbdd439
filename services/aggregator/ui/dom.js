// Elements in one expression. Text is always text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

// h("a", {href: "#/", class: "quiet", onclick: go}, "All runs", child) -> an element.
// Properties that begin with "on" are listeners, "data" is a dataset, null and false are left out.
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

// The same for SVG.
export function s(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== false));
  return element;
}

// Put other children in, and keep the keyboard's focus where an element has the same id as before.
export function replace(host, ...children) {
  const focused = host.contains(document.activeElement) ? document.activeElement.id : "";
  host.replaceChildren(...children.flat(Infinity).filter((each) => each !== null && each !== false));
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

// A colour of the style sheet, for canvases.
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// At most one call in `waitMs`, the last one counts.
export function throttled(waitMs, work) {
  let timer = null;
  return (...given) => {
    if (timer !== null) return;
    timer = setTimeout(() => {
      timer = null;
      work(...given);
    }, waitMs);
  };
}
