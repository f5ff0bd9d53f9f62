// Making elements. Text is always text: nothing that a policy or a user wrote is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replaces what is in `root`. Who was somewhere with the keyboard stays there, and tables stay where they were scrolled to. */
export function show(root, ...children) {
  const held = root.contains(document.activeElement) && document.activeElement !== root ? nameOf(document.activeElement) : null;
  const places = [...root.querySelectorAll("[data-scroll]")].map((one) => [one.dataset.scroll, one.scrollLeft]);
  root.replaceChildren(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  for (const [name, left] of places) {
    const again = left && root.querySelector(`[data-scroll="${CSS.escape(name)}"]`);
    if (again) again.scrollLeft = left;
  }
  if (held) root.querySelector(held)?.focus({ preventScroll: true });
}

/** A selector that finds an element again after its page was drawn anew. */
function nameOf(element) {
  const tag = element.localName;
  for (const attribute of ["id", "data-focus", "href", "aria-label", "data-at", "name"]) {
    const value = element.getAttribute(attribute);
    if (value) return `${tag}[${attribute}="${CSS.escape(value)}"]`;
  }
  return null;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
