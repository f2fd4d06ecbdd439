// Light or dark, before the first paint: a classic script, so that no wrong colour is shown first.
// The choice is kept in localStorage; without one the system's is taken.
(() => {
  const KEY = "headrace.theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try {
      return localStorage.getItem(KEY) ?? "system";
    } catch {
      return "system"; // storage is forbidden here: the system's choice is a good one
    }
  }

  function apply() {
    const choice = chosen();
    const dark = choice === "dark" || (choice === "system" && system.matches);
    root.dataset.theme = dark ? "dark" : "light";
    dispatchEvent(new CustomEvent("headrace-theme"));
  }

  window.headraceTheme = {
    chosen,
    choose(choice) {
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        root.dataset.theme = choice === "dark" ? "dark" : "light";
        dispatchEvent(new CustomEvent("headrace-theme"));
        return;
      }
      apply();
    },
  };
  system.addEventListener("change", apply);
  apply();
})();
