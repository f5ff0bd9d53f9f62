// Numbers, times and states as a person reads them.

// A learning rate is no zero, and what is left of 0.1 + 0.2 - 0.3 is one.
const isSmall = (value, below) => Math.abs(value) < below && Math.abs(value) > 1e-12;
const twoDigits = (value) => (Math.abs(value) < 1e-4 ? value.toExponential(1).replace(".0e", "e") : Number(value.toPrecision(2)).toString());

export const number = (value, digits = 3) =>
  value === null || value === undefined || Number.isNaN(value) ? "–"
    : Math.abs(value) >= 10000 ? Math.round(value).toLocaleString("en")
      : digits > 1 && isSmall(value, 10 ** (1 - digits)) ? twoDigits(value) : Number(value.toFixed(digits)).toString();

export const fixed = (value, digits = 2) =>
  value === null || value === undefined || Number.isNaN(value) ? "–" : isSmall(value, 0.5 / 10 ** digits) ? twoDigits(value) : value.toFixed(digits);

export const percent = (share, digits = 0) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;

export function bytes(count) {
  if (!count) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(count) / 10));
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** A span of time that was measured: milliseconds matter where it is short. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  if (value > 0 && value < 0.0995) return `${Math.max(1, Math.round(1000 * value))} ms`;
  return value < 10 ? `${value.toFixed(2)} s` : duration(value);
}

export function ago(time) {
  if (!time) return "–";
  const seconds = (Date.now() - Date.parse(time)) / 1000;
  return seconds < 5 ? "just now" : `${duration(seconds)} ago`;
}

export const clock = (time) => (time ? new Date(time).toLocaleString() : "–");

const KINDS = {
  running: "good", succeeded: "good", trained: "good", done: "good", ready: "good", starting: "info", resuming: "info", open: "info",
  validating: "info", invalid: "bad",
  queued: "plain", pausing: "warn", paused: "warn", cancelling: "warn", cancelled: "plain", failed: "bad", given_up: "bad",
};
export const kindOf = (status) => KINDS[status] || "plain";
export const isLive = (status) => ["running", "starting", "resuming", "pausing", "cancelling", "validating", "draining"].includes(status);
export const isOver = (status) => ["succeeded", "failed", "cancelled"].includes(status);

// What ended an episode badly, in the eyes of whoever looks for failures.
export const isFailure = (reason) => ["parse_error", "env_error", "env_crash", "tool_timeout", "episode_timeout", "context_overflow", "max_tokens", "repetition", "cancelled", "stale", "no_reward"].includes(reason);
export const words = (name) => String(name).replaceAll("_", " ");
