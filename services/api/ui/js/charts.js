// Curves over steps. One chart is one question; colours come from the theme and follow it when it changes.

import { css, h } from "./dom.js";
import { number } from "./format.js";

// Steps are whole.
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const sync = window.uPlot.sync("steps");

/**
 * series: [{label, color: "--c1", values, band: [low, high]?, points: bool?, stacked: bool?, width?, dash: [drawn, left out]?, format?}]
 * Returns {element, set(xs, series)}; `set` redraws in place.
 */
export function chart({ title, note, height = 190, range, format = number, wide = false }) {
  const place = h("div", { class: "chart" });
  const element = h("section", { class: `card${wide ? " wide" : ""}`, "data-chart": title }, h("header", {}, h("h2", {}, title), note && h("p", {}, note)), place);
  let plot = null;
  let last = null;

  function draw(xs, series) {
    last = [xs, series];
    plot?.destroy();
    plot = null;
    const shown = series.filter((one) => one.values.some((value) => value !== null && value !== undefined));
    if (!xs.length || !shown.length) {
      place.replaceChildren(h("div", { class: "none" }, "no values: they appear with the first step that has them"));
      return;
    }
    place.replaceChildren();
    const { data, lines, bands } = arrange(shown, format);
    plot = new window.uPlot({
      width: Math.max(200, place.clientWidth), height,
      scales: { x: { time: false }, y: { range: range || ((_, low, high) => padded(low, high)) } },
      axes: [{ ...axis(), incrs: WHOLE }, { ...axis(), size: 52, values: (_, ticks) => ticks.map((tick) => format(tick)) }],
      series: [{ label: "step" }, ...lines], bands, cursor: { sync: { key: sync.key }, points: { size: 7 } },
      legend: { live: true }, padding: [8, 8, 0, 0],
      hooks: { ready: [() => requestAnimationFrame(rest)] },
    }, [xs, ...data], place);
  }

  // Nobody points at it: the newest step is told.
  const rest = () => plot && last[0].length && plot.setLegend({ idx: last[0].length - 1 });
  place.addEventListener("mouseleave", () => requestAnimationFrame(rest));
  const resize = new ResizeObserver(() => plot && plot.setSize({ width: Math.max(200, place.clientWidth), height }));
  resize.observe(place);
  const repaint = () => last && place.isConnected && draw(...last);
  window.addEventListener("gspo-theme", repaint);
  return { element, set: draw, stop() { resize.disconnect(); window.removeEventListener("gspo-theme", repaint); plot?.destroy(); plot = null; } };
}

function arrange(series, format) {
  const data = [];
  const lines = [];
  const bands = [];
  const sums = [];
  for (const one of series) {
    const stroke = css(one.color);
    let values = one.values.map((value) => value ?? null);
    const raw = values;
    if (one.stacked) {
      values = values.map((value, at) => (sums[at] = (sums[at] || 0) + (value || 0)));
    }
    data.push(values);
    lines.push({
      label: one.label, stroke, width: one.points ? 0 : one.width ?? 1.8, spanGaps: true, dash: one.dash,
      fill: one.stacked ? alpha(stroke, 0.45) : undefined,
      points: { show: one.points ? true : values.length < 2, size: one.points ? 8 : 5, fill: stroke },
      paths: one.points ? () => null : undefined,
      value: (_, __, ___, at) => (at === null || raw[at] === null ? "–" : format(raw[at])),
    });
    if (one.stacked && data.length > 1) bands.push({ series: [data.length, data.length - 1], fill: alpha(stroke, 0.45) });
    if (one.band) {
      for (const edge of one.band) {
        data.push(edge);
        lines.push({ label: "", stroke: alpha(stroke, 0), width: 1, points: { show: false }, class: "edge" });
      }
      bands.push({ series: [data.length - 1, data.length], fill: alpha(stroke, 0.16) });
    }
  }
  // A stacked layer is filled between itself and the one below, the lowest down to the axis.
  lines.forEach((line, at) => { if (line.fill && at > 0) line.fill = undefined; });
  return { data, lines, bands };
}

function axis() {
  return { stroke: css("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1, size: 4 }, size: 34 };
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const bottom = low >= 0 ? 0 : low;
  const room = (high - bottom || Math.abs(high) || 1) * 0.08;
  return [low >= 0 ? 0 : low - room, high + room];
}

function alpha(color, share) {
  const hex = color.replace("#", "");
  const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${share})`;
}
