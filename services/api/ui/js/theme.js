// Before the first paint, so that nothing flashes: the theme that was chosen, else the one of the system.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("gspo-theme"); } catch { /* no storage: the system decides */ }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen || (dark ? "dark" : "light");
})();
