// The settings of a run, or what differs between several; the commands that pause and stop a run.

import { element } from "./nodes.js";

const UNSET = "–";

// Keys of the configurations of `known`, by name; of several runs only those that differ.
export function settingsTable(known, { table }) {
  const configs = known.map((run) => run.config ?? {});
  const keys = [...new Set(configs.flatMap((config) => Object.keys(config)))].sort();
  const shown = known.length > 1 ? keys.filter((key) => new Set(configs.map((config) => config[key] ?? UNSET)).size > 1) : keys;
  if (!keys.length) return [];
  if (!shown.length) return [element("p", {}, "All settings are the same.")];
  const rows = shown.map((key) => [element("code", {}, key), ...configs.map((config) => element("span", {}, config[key] ?? UNSET))]);
  return [table("Settings", ["Key", ...known.map((run) => run.id)], rows, shown)];
}

export function settingsTitle(known) {
  return known.length > 1 ? "Settings that differ" : "Settings";
}

// What to type for a run, with a button that copies it.
export function commands(run) {
  const typed = Object.entries(run.summary.commands ?? {}), instead = run.summary.to_go_on;
  if (instead) return element("p", { class: "commands" }, element("small", {}, "to go on, "), element("bdi", {}, instead));
  if (!typed.length) return null;
  return element("p", { class: "commands" }, ...typed.flatMap(([what, text]) => [
    element("span", { class: "copyable" }, element("small", {}, what), element("code", {}, text), element("button", { type: "button", "data-copy": text, "aria-label": `Copy the command: ${what}` }, "Copy"))]));
}
