// The page: which runs are shown, what the server says of them, and how that looks.
// Names and sentences come from strangers: they are only ever set as text.

import { ago, Chart, duration, fixed, number, smooth } from "./chart.js";
import { element, put } from "./nodes.js";
import { commands, settingsTable, settingsTitle } from "./settings.js";
import { beforeAndAfter, samples } from "./samples.js";
import { asOf, drawMeans, gave, swarmOf, swarmPage, worth } from "./swarm.js";

const MOST = 8;
const FIRST = 10; // runs and rows that are listed at once
const SILENT_MS = 25000; // the server says something every ten seconds: a connection that says nothing is dead
const ANSWER_MS = 5000;
const AGAIN_MS = [2000, 4000, 8000, 15000];
const LOST = "connection lost, trying again";
const find = (id) => document.getElementById(id);
const COLORS = 8;
const NARROW = matchMedia("(max-width: 640px)").matches; // where less is shown at first

let listed = [];
let selected = [];
let source = null;
let silence = 0; // timers
let retry = 0;
let failures = 0; // in a row
let drawing = false;
let allEvents = false;
let allRuns = false;
const runs = new Map(); // id -> {summary, status, events, heldOut, columns, perRow, rounds, gone}

// ------------------------------------------------------------------ what the server says

const takes = {
  list(message) {
    listed = message.runs;
    drawRuns();
  },
  summary(message, run) {
    run.summary = message.summary;
    run.gone = false;
  },
  status(message, run) { run.status = message.status; },
  events(message, run) { run.events = message.events; },
  samples(message, run) { run.samples = message.samples; },
  held_out(message, run) { run.heldOut = message.held_out; },
  config(message, run) { run.config = message.config; },
  gone(message, run) { run.gone = true; },
  curves(message, run) {
    if (message.first === 0) run.columns = new Map();
    run.perRow = message.per_row;
    run.rounds = message.rounds;
    for (const [name, parts] of Object.entries(message.points)) {
      if (!run.columns.has(name)) run.columns.set(name, {});
      const column = run.columns.get(name);
      for (const [part, values] of Object.entries(parts)) {
        const known = (column[part] ??= []);
        while (known.length < message.first) known.push(null);
        known.length = message.first;
        for (const value of values) known.push(value);
      }
    }
  },
};

function open() {
  runs.clear();
  for (const id of selected) runs.set(id, { columns: new Map(), events: [], config: null, heldOut: null, status: null, summary: null, perRow: 1, rounds: 0, gone: false });
  connect();
}

function connect() {
  close();
  heard();
  source = new EventSource("api/stream?" + selected.map((id) => "run=" + encodeURIComponent(id)).join("&"));
  for (const [kind, take] of Object.entries(takes)) {
    source.addEventListener(kind, (event) => {
      heard();
      const message = JSON.parse(event.data);
      const run = runs.get(message.id);
      if (kind !== "list" && !run) return;
      take(message, run);
      redraw();
    });
  }
  source.addEventListener("alive", heard);
  source.onopen = () => {
    failures = 0;
    heard();
    connection("live", "live");
  };
  source.onerror = lost; // for good, if the answer was not 200: so trying again is not left to the browser
}

function close() {
  clearTimeout(retry);
  clearTimeout(silence);
  source?.close();
  source = null;
}

function heard() {
  clearTimeout(silence);
  silence = setTimeout(lost, SILENT_MS);
}

async function lost() {
  close();
  retry = setTimeout(connect, again());
  const said = () => find("connection").className === "lost";
  if (!said()) connection("lost", LOST);
  const why = await ask().then(() => LOST, (error) => (error instanceof Refused ? error.message : LOST));
  if (said()) connection("lost", why);
}

function again() {
  return AGAIN_MS[Math.min(failures++, AGAIN_MS.length - 1)];
}

class Refused extends Error {}

// The runs that there are. An event source does not tell why it was refused: this does.
async function ask() {
  const answer = await fetch("api/runs", { signal: AbortSignal.timeout(ANSWER_MS) });
  if (!answer.ok) {
    const said = (await answer.text()).trim().slice(0, 200) || `answer ${answer.status}`;
    throw new Refused(answer.status === 401 ? said : `${said}, trying again`); // 401 says what to do
  }
  return (await answer.json()).runs;
}

function connection(state, text) {
  if (find("connection").textContent === text) return; // or a screen reader would say it again and again
  find("connection").className = state;
  find("connection").textContent = text;
}

// ------------------------------------------------------------------ which runs are shown

function fromAddress() {
  try {
    return location.hash.slice(1).split("&").filter(Boolean).map(decodeURIComponent);
  } catch {
    return [];
  }
}

function select(ids) {
  selected = ids.slice(0, MOST);
  history.replaceState(null, "", "#" + selected.map(encodeURIComponent).join("&"));
  drawRuns();
  open();
}

const items = new Map(); // id -> its place in the list: nodes stay, or clicks and focus would be lost with them

function item(id) {
  if (!items.has(id)) {
    const box = element("input", { type: "checkbox" }), name = element("span", {}, id), state = element("small");
    box.dataset.run = id;
    box.addEventListener("change", () => toggle(id, box.checked));
    const label = element("label", {}, box, name, state);
    items.set(id, { box, name, state, label, node: element("li", {}, label) });
  }
  return items.get(id);
}

const DOTS = { training: "running", serving: "running", waiting: "paused", starting: "paused" }; // green and yellow

function drawRuns() {
  for (const run of listed) {
    const { box, name, state, label } = item(run.id), at = selected.indexOf(run.id);
    const shown = runs.get(run.id), now = shown?.summary?.state ?? run.end ?? (run.paused ? "paused" : run.starting ? "starting" : "running");
    const silent = run.page && shown && !shown.status?.page?.members; // nobody of the swarm has answered, as far as it is looked at
    box.checked = at >= 0;
    box.disabled = at < 0 && selected.length >= MOST;
    name.className = `name ${silent ? "silent" : DOTS[now] ?? now}`;
    name.textContent = run.title ?? run.id;
    state.textContent = run.page ? "swarm" : run.rounds === null ? now : `${now}, round ${number(run.rounds)}`;
    label.className = at >= 0 ? `c${at % COLORS} chosen` : "";
    label.title = run.path;
  }
  const begun = listed.filter((run) => !isEmpty(run)), kept = new Set(begun.slice(0, FIRST));
  const shown = listed.filter((run) => allRuns || kept.has(run) || selected.includes(run.id)), more = find("more-runs");
  more.hidden = shown.length === listed.length;
  const rest = listed.length - shown.length, empty = listed.length - begun.length;
  more.textContent = `Show ${counted(rest, "more run")}${empty ? `, ${rest === empty ? "all" : empty} without a round` : ""}`;
  const nodes = shown.map((run) => item(run.id).node), list = find("runs");
  if (nodes.length !== list.children.length || nodes.some((node, i) => node !== list.children[i])) {
    const focused = document.activeElement;
    list.replaceChildren(...nodes);
    if (list.contains(focused)) focused.focus();
  }
  list.parentNode.hidden = listed.length < 2;
}

// A start that failed leaves a run without a round.
function isEmpty(run) {
  return run.trains && run.rounds === null && !run.in_use && !selected.includes(run.id);
}

function toggle(id, on) {
  const ids = on ? [...selected, id] : selected.filter((other) => other !== id);
  if (ids.length) select(ids);
  else drawRuns();
}

// ------------------------------------------------------------------ drawing

function redraw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}

function draw() {
  drawRuns();
  const all = selected.map((id, i) => ({ id, color: `c${i % COLORS}`, ...runs.get(id) }));
  drawNotices(all);
  const shown = all.filter((run) => run.status?.role !== "page"), known = shown.filter((run) => run.summary);
  const pages = all.filter((run) => !shown.includes(run)), [page] = pages;
  put(find("swarm"), ...pages.flatMap((run) => swarmPage(run, known, tools)));
  drawMeans(pages);
  find("main").classList.toggle("several", shown.length > 1);
  find("settings").hidden = all.length > 0 && !shown.length;
  put(find("figures"), ...(known.length === 1 ? tiles(known[0]) : known.length ? comparison(known) : []));
  drawCharts(shown);
  drawTasks(shown);
  put(find("learned"), ...known.flatMap((run) => [worth(run, known, tools), gave(run, known, tools), beforeAndAfter(run, known, tools)]).filter(Boolean));
  put(find("details"), ...known.flatMap((run) => [samples(run, known, tools), peers(run, known), refusals(run, known), averaging(run, known), crew(run, known), isBeside(run, all) ? null : swarmOf(run, known, tools)]).filter(Boolean));
  drawSettings(known);
  drawEvents(known);
  if (page) document.title = `swarm ${page.status.swarm_name || page.id} – swarm-node`;
  else document.title = known.length === 1 ? `${known[0].id}: ${known[0].summary.state} – swarm-node` : "swarm-node";
}

// Whether the page of the run's swarm is shown anyway.
function isBeside(run, all) {
  return all.some((other) => other.status?.role === "page" && other.status.swarm === run.status?.swarm);
}

function drawNotices(shown) {
  const texts = shown.flatMap((run) => (run.gone ? [`${run.id} is not there any more`] : run.summary?.problems ?? []));
  const box = find("notices"), now = texts.join("\n");
  if (box.dataset.text === now) return; // or a screen reader would say it again and again
  box.dataset.text = now;
  box.replaceChildren(...texts.map((text) => element("p", { class: "notice" }, text)));
}

const bytes = (value) => (value === undefined || value === null ? "–" : value < 1e6 ? `${(value / 1e3).toFixed(1)} kB` : value < 1e9 ? `${(value / 1e6).toFixed(2)} MB` : `${(value / 1e9).toFixed(2)} GB`);
const money = (value) => (value === undefined ? null : value >= 100 ? number(value) : value.toLocaleString("en", { maximumSignificantDigits: 3 }));
// How long ago, or of an ended run at what time: the first would go on counting.
const when = (run, time) => (run.summary.over ? `at ${clock(time).slice(0, -3)}` : ago(time));
const signed = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(3)}`;

function state(run) {
  const { state, paused } = run.summary;
  const badge = element("span", { class: `state ${state}`, "data-figure": "state" }, state);
  return paused ? element("span", {}, badge, " ", element("small", {}, paused)) : badge;
}

function figure(name, key, value, ...more) {
  return element("div", {}, element("dt", {}, name), element("dd", { "data-figure": key }, value), ...more.filter(Boolean).map((text) => element("dd", { class: "more" }, text)));
}

// A change of a held-out figure, and whether it is more than noise: a paired bootstrap, as in the summary of the run.
function change(by, found) {
  const [low, high] = found?.interval ?? [], sure = low > 0 ? "up" : high < 0 ? "down" : null;
  const range = found?.interval ? ` (95 %: ${signed(low)} to ${signed(high)})` : "";
  return element("span", {}, element("span", { class: sure }, signed(by)), found ? `, ${found.verdict}${range}` : "");
}

// Held-out figures of the newest checkpoint: [name, value, when, change].
function heldOut({ heldOut: found }) {
  if (!found?.points.length) return null;
  const value = (point) => point[found.figure] ?? null, first = found.points[0], last = found.points[found.points.length - 1];
  const when = last.round ? `after round ${number(last.round)}` : "before training";
  const values = first === last ? fixed(value(last)) : `${fixed(value(first))} → ${fixed(value(last))}`;
  const by = first === last || value(first) === null || value(last) === null ? null : change(value(last) - value(first), found.change);
  return [found.figure === "reward" ? "Held-out reward" : "Held-out pass@1", values, when, by];
}

// What got worse by more than noise, each with a remedy: the run's own sentences.
function worse(run, before = "") {
  return (run.heldOut?.worse ?? []).map((text) => element("p", { class: "notice" }, before + text));
}

function traffic(run) {
  const { last } = run.summary, live = run.status?.traffic;
  return { in: live?.bytes_in ?? last["swarm/bytes_in"], out: live?.bytes_out ?? last["swarm/bytes_out"] };
}

// Counts of the status begin anew with each start of the node: since when they count; empty if unknown.
function since(run) {
  const from = run.status?.since;
  if (!from) return "";
  const [day, time] = clock(from).split(" "), [today] = clock(Date.now() / 1000).split(" ");
  return `since ${day === today ? "" : `${day} `}${time.slice(0, 5)}`;
}

function counted(n, one, many = one + "s") {
  return `${number(n)} ${n === 1 ? one : many}`;
}

function present(status) {
  const absent = absentFrom(status);
  return Object.entries(status.peers ?? {}).filter(([id, peer]) => peer.present && !absent.has(id)).length;
}

function tiles(run) {
  const { summary } = run, { last } = summary, moved = traffic(run), inSwarm = run.status !== null || summary.peers !== null;
  const trains = summary.state === "training", { over } = summary, held = heldOut(run);
  const list = element("dl", { class: "tiles" });
  if (summary.trains) list.append(
    summary.few_rounds
      ? figure("Reward", "reward", fixed(summary.reward_last), `in the last of ${counted(summary.few_rounds, "round")}, too few for a trend`)
      : figure("Reward", "reward", `${fixed(summary.reward_first)} → ${fixed(summary.reward_last)}`, "first to last tenth of rounds"),
    ...(held ? [figure(held[0], "held_out", ...held.slice(1))] : []),
    figure(over ? "Rounds" : "Round", "rounds", number(summary.rounds), summary.of ? `of ${number(summary.of)}` : null,
      over ? summary.seconds && `in ${duration(summary.seconds)}` : summary.step_s && `${duration(summary.step_s)} each`));
  if (trains) list.append(
    figure("Tokens a second", "tok_s", number(summary.tok_s), "sampled", summary.trained_tok_s ? `${number(summary.trained_tok_s)} trained` : null));
  if (trains && last["machine/cpu_cores"] !== undefined) list.append(
    figure("This machine", "machine", `${last["machine/cpu_cores"].toFixed(1)} of ${number(last["machine/cores"])} core${last["machine/cores"] === 1 ? "" : "s"}`,
      `${(last["machine/memory_bytes"] / 2 ** 30).toFixed(2)} GiB of memory`,
      last["machine/gpu_bytes"] ? `${(last["machine/gpu_bytes"] / 2 ** 30).toFixed(2)} GiB of the GPU` : null));
  if (inSwarm) {
    const others = summary.peers ?? present(run.status);
    if (!over) list.append(figure("Other members", "peers", number(others), last["swarm/trainers"] === undefined ? null : `${number(last["swarm/trainers"])} of them training`, asOf(run.status?.page)));
    if (summary.foreign !== null) {
      const own = summary.own === null ? "" : `${number(summary.own)} + `;
      list.append(figure("Groups trained on", "groups", own + number(summary.foreign), own ? "own + foreign" : "foreign"));
    }
    list.append(figure("Network", "bytes", `${bytes(moved.in)} in`, `${bytes(moved.out)} out`, since(run) || null));
  }
  if (run.status?.averaging) list.append(figure("Weights averaged", "exchanges", counted(run.status.averaging.exchanges ?? 0, "time"), over ? null : `with ${counted(Object.keys(run.status.averaging.partners ?? {}).length, "partner")} here`));
  const cost = money(last["cost/spent"]), group = money(last["cost/per_admitted_group"]), point = money(last["cost/per_reward_point"]);
  if (cost) list.append(figure("Spent", "cost", cost, group && `${group} a group`, point && `${point} a point of reward`));
  const named = run.status?.swarm_name ? `swarm ${run.status.swarm_name}` : run.status ? "in a swarm" : "alone";
  const when = summary.ended ? summary.ended_at && summary.ended.replace("{ago}", `${clock(summary.ended_at).slice(0, -3)}, ${ago(summary.ended_at)}`) : summary.last_at && `last round ${ago(summary.last_at)}`;
  const said = [summary.settings.model, named, when].filter(Boolean).join(" · ");
  return [element("h2", { class: "run" }, run.id, " ", state(run), " ", element("small", { title: summary.path }, said)), list, ...worse(run), commands(run)].filter(Boolean);
}

function comparison(known) {
  const columns = [
    ["Run", (run) => element("span", { class: `key ${run.color}` }, run.id)],
    ["State", state],
    ["Round", (run) => number(run.summary.rounds)],
    ["Reward, first tenth", (run) => fixed(run.summary.reward_first)],
    ["last tenth", (run) => fixed(run.summary.reward_last)],
    ["Other members", (run) => number(run.summary.over ? null : run.summary.peers)],
    ["Own groups", (run) => number(run.summary.own)],
    ["Foreign groups", (run) => number(run.summary.foreign)],
    ["In", (run) => bytes(traffic(run).in)],
    ["Out", (run) => bytes(traffic(run).out)],
    ["Tokens/s", (run) => number(run.summary.state === "training" ? run.summary.tok_s : null)],
  ];
  if (known.some(heldOut)) columns.splice(5, 0, ["Held-out", (run) => { const [, values, when, by] = heldOut(run) ?? []; return values ? element("span", {}, values, " ", element("small", {}, when, by ? ": " : null, by)) : "–"; }]);
  const spent = (run) => money(run.summary.last["cost/spent"]);
  if (known.some(spent)) columns.push(["Spent", (run) => spent(run) ?? "–"]);
  const rows = known.map((run) => columns.map(([, cell]) => cell(run)));
  const told = (_, i) => rows.some((row) => row[i] !== "–"); // a column that is empty for all is left out
  const shown = table("Key figures of the runs", columns.filter(told).map(([title]) => title), rows.map((row) => row.filter(told)), known.map((run) => run.id));
  return [shown, ...known.flatMap((run) => worse(run, `${run.id}: `)), ...notComparable(known).map((text) => element("p", {}, text))];
}

const SAMPLED = ["rollouts.max_new_tokens", "rollouts.temperature", "rollouts.top_p", "rewards.answer", "policy.system_prompt", "policy.prompt_template", "eval.samples"];

// Which figures of these runs measure something else in each, as far as their settings tell.
function notComparable(known) {
  const differ = (of) => new Set(known.map((run) => of(run.config ?? {}))).size > 1;
  const own = (config) => (config["eval.tasks"] ?? "[]") === "[]"; // asked is what is held out of its tasks
  const asked = (config) => [own(config) ? config.tasks : config["eval.tasks"], own(config), config["eval.questions"]].join("\n");
  const sampling = (config) => SAMPLED.map((key) => config[key]).join("\n"), measured = known.filter(heldOut).length > 1;
  const rewards = (config) => ["functions", "checker_weight", "partial"].map((key) => config[`rewards.${key}`]).join("\n");
  return [
    measured && differ(asked) ? "Held-out questions differ: held-out figures are not comparable." : null,
    measured && differ(sampling) ? "Held-out answers are sampled differently: held-out figures are not comparable." : null,
    differ(rewards) ? "Rewards differ: mean rewards are not comparable." : null,
  ].filter(Boolean);
}

// The first of a list, and a button that shows the others, if there are any.
function beginning(label, all, most) {
  const shown = whole.has(label) ? all : all.slice(0, most), rest = all.length - shown.length;
  return [shown, rest ? element("button", { type: "button", "data-whole": label }, `Show ${number(rest)} more`) : null];
}

// The first cell of each row is its header; on a narrow screen rows become cards.
// `keys` say which row is which when their order changes.
function table(label, titles, all, keys = []) {
  const [rows, more] = beginning(label, all, FIRST);
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const body = rows.map((cells, row) => element("tr", { "data-key": keys[row] }, ...cells.map((cell, i) =>
    i ? element("td", { "data-label": titles[i] }, cell) : element("th", { scope: "row" }, cell))));
  return element("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0", "data-key": label },
    element("table", { class: "cards" }, element("thead", {}, head), element("tbody", {}, ...body)), more);
}

const whole = new Set(); // labels of the lists that are shown whole
addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-whole]");
  if (!button) return;
  whole.add(button.dataset.whole);
  redraw();
});

// ------------------------------------------------------------------ curves

const rate = { rate: true, format: (value) => `${bytes(value)}/s` };
const CHARTS = [
  { title: "Reward", note: "mean of all answers sampled", wide: true, height: 270, series: [["reward"]] },
  { title: "Rewards by function", note: "mean, before weights", prefix: "rewards/", several: true, series: [] },
  { title: "Held-out questions", note: "pass@1: share of right answers; pass@k: of questions with a right one among k", heldOut: true, dots: true, series: [["eval/pass_1", "pass@1"], ["eval/pass_k", "pass@k"]] },
  { title: "Held-out questions: reward", note: "mean of all answers", heldOut: true, dots: true, series: [["eval/reward"]] },
  { title: "Groups trained on", note: "a round", stacked: true, whole: true, series: [["swarm/groups_own", "own"], ["swarm/groups_used", "foreign"]] },
  { title: "Foreign groups", note: "running total", total: true, whole: true, series: [["swarm/groups_admitted", "admitted"], ["swarm/groups_received", "not admitted so far", "swarm/groups_admitted"]] },
  { title: "Network", note: "bytes a second", ...rate, series: [["swarm/bytes_in", "in"], ["swarm/bytes_out", "out"]] },
  { title: "Difference to averaging partner", note: "of weights, root mean square", series: [["averaging/spread"]] },
  { title: "Weights averaged", note: "times", series: [["averaging/exchanges"]], total: true, whole: true },
  { title: "Stages lost and built", note: "running total", total: true, whole: true, prefix: "stages/recovered/", series: [["stages/lost", "lost"]] },
  { title: "Pipeline: share of time spent waiting", series: [["stages/bubble"]] },
  { title: "Tokens a second", series: [["perf/generated_tok_s", "sampled"], ["perf/trained_tok_s", "trained"]] },
  { title: "Cores in use", series: [["machine/cpu_cores", "in use"], ["machine/cores", "in all"]] },
  { title: "Entropy", note: "how varied answers are, in nats a token", series: [["entropy"]] },
];

function settings() {
  return { axis: find("axis").value, share: +find("smoothing").value, raw: find("raw").checked };
}

function xs(run, axis) {
  if (axis === "round") return run.columns.get("round")?.mean ?? [];
  const times = run.columns.get("time")?.mean ?? [];
  return times.map((time) => time - times[0]);
}

// Increase a second of a running total; where it begins anew with the process, what is there.
function rates(run, values) {
  const times = run.columns.get("time")?.mean ?? [];
  return values.map((value, i) => {
    if (!i || value === null || values[i - 1] === null || !(times[i] > times[i - 1])) return null;
    return Math.max(0, value >= values[i - 1] ? value - values[i - 1] : value) / (times[i] - times[i - 1]);
  });
}

// A running total that begins anew with each process, since the first of them.
function totals(values) {
  let before = 0, last = 0;
  return values.map((value) => {
    if (value === null) return null;
    if (value < last) before += last;
    last = value;
    return before + value;
  });
}

// A running total, less another one.
function difference(run, sums, less) {
  const other = run.columns.get(less), all = totals(sums);
  if (!other) return all;
  const without = totals(other.most ?? other.mean);
  return all.map((value, i) => (value === null || without[i] === null ? null : Math.max(0, value - without[i])));
}

// Held-out figures by round: those from between rounds, from before the first one (round 0), and the latest.
function measured(run, name) {
  const rounds = run.columns.get("round")?.mean ?? [], times = run.columns.get("time")?.mean ?? [];
  const found = new Map();
  run.columns.get(name)?.mean.forEach((value, i) => { if (value !== null) found.set(rounds[i], value); });
  for (const point of run.heldOut?.points ?? []) {
    const value = point[name.replace("eval/", "")];
    if (value !== undefined) found.set(point.round, value);
  }
  const at = [...found.keys()].sort((a, b) => a - b);
  const elapsed = (round) => Math.max(0, (times[rounds.findLastIndex((each) => each <= round)] ?? 0) - (times[0] ?? 0));
  return { x: settings().axis === "round" ? at : at.map(elapsed), y: at.map((round) => found.get(round)) };
}

function line(run, name, { label = "", less = null, color = run.color, dash = false, heldOut = false, rate = false, total = false, dots = false } = {}) {
  const { axis, share } = settings();
  if (heldOut) {
    const points = measured(run, name);
    return points.x.length ? { label: label.replace("@k", `@${run.heldOut?.samples ?? "k"}`), color, dash, dots, raw: null, ...points } : null;
  }
  const column = run.columns.get(name), x = xs(run, axis);
  if (!column || !x.length) return null;
  const sums = column.most ?? column.mean; // of a running total, the mean over a restart would be another restart
  const values = rate ? rates(run, sums) : total ? difference(run, sums, less) : column.mean;
  const longest = Math.max(...selected.map((id) => runs.get(id).rounds)); // the same mean for all, as far as it goes
  const window = total ? 1 : Math.floor(Math.min((share * longest) / run.perRow, x.length / 3));
  const several = run.perRow > 1 && !rate && !total;
  return { label, color, dash, dots, x, y: smooth(values, window), raw: window > 1 && !rate ? values : null, least: several ? column.least : null, most: column.most };
}

function drawChart(chart, plan, shown) {
  const one = shown.length === 1, series = [...plan.series];
  if (plan.prefix) {
    const names = new Set(shown.flatMap((run) => [...run.columns.keys()].filter((name) => name.startsWith(plan.prefix) && !name.endsWith("/std"))));
    if (plan.several && names.size < 2) names.clear();
    series.push(...[...names].sort().map((name) => [name, name.slice(plan.prefix.length).replace(/\/mean$/, "")]));
  }
  let lines = shown.flatMap((run) => series.map(([name, label, less], i) => {
    const words = [one ? null : run.id, label].filter(Boolean).join(", ");
    return line(run, name, { ...plan, label: words, less, color: one ? `c${(+run.color.slice(1) + i) % COLORS}` : run.color, dash: !one && i > 0 });
  }));
  lines = lines.filter(Boolean);
  const stacked = one && plan.stacked && lines.length === 2;
  if (stacked) stack(lines);
  if (plan.stacked) chart.note.textContent = stacked ? `${plan.note}, stacked` : plan.note;
  const { axis, raw } = settings();
  chart.show(lines, { axis, raw: raw && (one || Boolean(plan.wide)), format: plan.format ?? number, zero: plan.zero ?? true, whole: plan.whole, over: allEnded(shown) });
}

const allEnded = (shown) => shown.every((run) => run.summary?.over);

function stack([below, above]) {
  const own = below.y;
  above.value = above.y;
  above.y = above.y.map((value, i) => (value === null ? null : value + (own[i] ?? 0)));
  above.base = own.map((value) => value ?? 0);
  for (const each of [below, above]) Object.assign(each, { area: true, raw: null, least: null });
}

const drawn = CHARTS.map((plan) => [plan, new Chart(plan.title, plan)]);
const chosen = ["grad_norm", "completions/mean_length"].map((wanted, i) => {
  const chart = new Chart("", {});
  const choice = element("select", { "aria-label": `Metric of curve ${i + 1}` });
  chart.title.replaceChildren(choice);
  choice.addEventListener("change", redraw);
  return { chart, choice, wanted };
});

// Among the large charts is the held-out figure that counts for these runs.
function placeHeldOut(shown) {
  const byReward = shown.length > 0 && shown.every((run) => run.summary?.figure === "reward");
  for (const [plan, chart] of drawn.filter(([plan]) => plan.heldOut)) {
    const wide = byReward === (plan.series[0][0] === "eval/reward"), place = find(wide ? "first" : "charts");
    chart.node.classList.toggle("wide", wide);
    if (chart.node.parentNode !== place) place.insertBefore(chart.node, wide ? null : place.firstChild);
  }
}

function drawCharts(shown) {
  placeHeldOut(shown);
  for (const [plan, chart] of drawn) drawChart(chart, plan, shown);
  const names = [...new Set(shown.flatMap((run) => [...run.columns.keys()]))].filter((name) => name !== "round" && name !== "time").sort();
  for (const [i, { chart, choice, wanted }] of chosen.entries()) {
    const now = [choice.value, wanted, names[i]].find((name) => names.includes(name));
    if (choice.dataset.names !== names.join()) {
      choice.replaceChildren(...names.map((each) => element("option", { selected: each === now }, each)));
      choice.dataset.names = names.join();
    }
    chart.call(choice.value);
    drawChart(chart, { series: [[choice.value]], zero: false }, shown);
  }
  find("training").hidden = [...find("charts").children].every((node) => node.hidden);
}

const taskCharts = new Map();

function drawTasks(shown) {
  const names = [...new Set(shown.flatMap((run) => [...run.columns.keys()].filter((name) => name.startsWith("reward/"))))].sort();
  find("tasks").hidden = names.length < 2;
  if (names.join() !== find("tasks").dataset.names) {
    find("tasks").dataset.names = names.join();
    for (const name of names) if (!taskCharts.has(name)) {
      const chart = new Chart(name.slice("reward/".length), { height: 96, small: true });
      chart.ends = element("span", { class: "ends" });
      chart.node.querySelector("figcaption").append(chart.ends);
      taskCharts.set(name, chart);
    }
    find("task-charts").replaceChildren(...names.map((name) => taskCharts.get(name).node));
  }
  const { axis } = settings(), one = shown.length === 1;
  for (const name of names) {
    const chart = taskCharts.get(name);
    const lines = shown.map((run) => line(run, name, { label: one ? "" : run.id })).filter(Boolean);
    chart.show(lines, { axis, raw: false, top: 1, format: fixed, over: allEnded(shown) });
    put(chart.ends, ...lines.map((each) => {
      const known = each.y.filter((value) => value !== null), first = known[0], last = known[known.length - 1];
      return element("span", { class: `key ${each.color}` }, one ? `${first.toFixed(2)} → ${last.toFixed(2)}` : last.toFixed(2));
    }));
  }
}

// ------------------------------------------------------------------ peers, averaging, stages, events

function heading(run, known, title) {
  return element("h2", {}, title, known.length > 1 ? element("span", { class: `key ${run.color}` }, run.id) : null);
}

function about(run, title, ...children) {
  return element("section", { "aria-label": `${title} of ${run.id}`, "data-key": `${title} of ${run.id}` }, ...children);
}

function section(run, known, title, ...children) {
  return about(run, title, heading(run, known, title), ...children);
}

// A section that on a narrow screen is closed at first.
function foldable(run, known, title, ...children) {
  return about(run, title, element("details", { open: !NARROW }, element("summary", {}, heading(run, known, title)), ...children));
}

function reasons(table, prefix = "") {
  return Object.entries(table ?? {}).filter(([name, n]) => name.startsWith(prefix) && n)
    .sort((a, b) => b[1] - a[1]).map(([name, n]) => `${number(n)} × ${name.slice(prefix.length)}`).join(", ");
}

const short = (peer) => `…${String(peer).slice(-8)}`;

function named(name, peer) {
  return element("span", {}, String(name || "a peer"), " ", element("code", { title: peer }, short(peer)));
}

function bar(value, most) {
  const inner = element("span", { class: "fill" });
  inner.style.width = `${most ? (100 * value) / most : 0}%`;
  return element("span", { class: "bar", "aria-hidden": "true" }, inner);
}

// Peers of its crew of whom nothing is heard, though their cards may still be there.
const absentFrom = (status) => new Set(status.crew?.absent ?? []);

// What the status of an ended run says was so at its end.
const nowOrThen = (run) => (run.summary.over ? "At the end" : "Now");

function presence(peer, absent) {
  if (!peer.present) return element("span", { class: "away" }, "gone");
  if (absent) return element("span", { class: "away" }, "silent");
  return element("span", { class: "here" }, peer.trains === false ? "here, trains nothing" : "here");
}

function peers(run, known) {
  const { status } = run;
  if (!status?.peers) return null;
  const all = Object.entries(status.peers).sort(([a, x], [b, y]) => (y.used ?? 0) - (x.used ?? 0) || (y.received ?? 0) - (x.received ?? 0) || (a < b ? -1 : 1));
  const sums = [];
  const { received, sent } = status;
  if (received) {
    const refused = reasons(received, "swarm/rejected/"), waiting = received["swarm/groups_waiting"];
    const rest = waiting ? `, ${number(waiting)} ${run.summary.over ? "never examined" : "not examined yet"}` : "";
    sums.push(`Received ${number(received["swarm/groups_received"] ?? 0)} groups, admitted ${number(received["swarm/groups_admitted"] ?? 0)}${rest}${refused ? `. Not used or refused: ${refused}` : ""}.`);
  }
  if (sent) {
    const unsent = reasons(sent, "swarm/unsent/");
    sums.push(`Sent ${number(sent["swarm/groups_sent"] ?? 0)} groups${unsent ? `; not sent: ${unsent} (this node used them all the same)` : ""}.`);
  }
  if (sums.length && since(run)) sums.push(`Counted ${since(run)}.`);
  if (status.restarts?.length) sums.push(`Network: ${status.restarts.join("; ")}.`);
  const told = run.summary.over ? "" : asOf(status.page);
  if (all.length && told) sums.push(`Presence and updates ${told}.`);
  if (!all.length && !sums.length) return null; // the tile says that nobody is here
  if (!all.length) return foldable(run, known, "Peers", element("p", {}, "Nobody else is here.", ...sums.map((sum) => " " + sum)));
  const absent = absentFrom(status);
  const counts = all.some(([, peer]) => "received" in peer), most = Math.max(...all.map(([, peer]) => peer.used ?? 0));
  const figures = ["Received", "Admitted", "Used", "Not used or refused"];
  const rows = all.map(([id, peer]) => [
    named(peer.name, id),
    presence(peer, absent.has(id)),
    number(peer.policy_version),
    ...(counts ? [number(peer.received ?? 0), number(peer.admitted ?? 0),
      element("span", { class: "barred" }, number(peer.used ?? 0), bar(peer.used ?? 0, most)),
      (peer.muted ? "muted; " : "") + (reasons(peer.rejected) || "none")] : []),
  ]);
  return foldable(run, known, "Peers", sums.length ? element("p", {}, sums.join(" ")) : null,
    table(`Peers of ${run.id}`, ["Peer", nowOrThen(run), "Updates", ...(counts ? figures : [])], rows, all.map(([id]) => id)));
}

// A row for each source, the worst first.
function refusals(run, known) {
  const refused = run.status?.refused ?? [];
  if (!refused.length) return null;
  const rows = refused.map((row) => [
    /[.:]/.test(row.source) ? String(row.source) : named(row.name, row.source),
    row.address || "–",
    String(row.says),
    when(run, row.last),
  ]);
  return foldable(run, known, "Refused, by source",
    table(`Refused by ${run.id}`, ["From", "At", "What", "Last"], rows, refused.map((row) => row.source)));
}

function terms(pairs) {
  return element("dl", { class: "terms" }, ...pairs.filter(([, value]) => value).map(([term, value]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, value))));
}

function averaging(run, known) {
  const figures = run.status?.averaging;
  if (!figures) return null;
  const partners = Object.values(figures.partners ?? {}).map(String).sort();
  return foldable(run, known, "Averaging of weights", terms([
    ["Method", [figures.when, figures.method, figures.codec].filter(Boolean).join(", ")],
    [run.summary.over ? "Partners at the end" : "Partners here", partners.length ? `${partners.length}: ${partners.slice(0, 8).join(", ")}${partners.length > 8 ? ", …" : ""}` : "none"],
    ["Exchanges", `${number(figures.exchanges ?? 0)}${figures.last ? `, last with ${figures.last.with} ${when(run, figures.last.time)}` : ""}`],
    ["Sent", bytes(figures.bytes)],
    ["Difference to the last partner", figures.spread ? number(figures.spread) : null],
    ["Skipped", reasons(figures.skipped) || "never"],
    ["Refused to others", reasons(figures.refused) || "nothing"],
    ["Cohort", figures.cohort],
  ]));
}

function missingStage({ since, taker }) {
  const by = taker ? ["being rebuilt by ", named(taker.name, taker.peer)] : ["held by nobody"];
  return element("span", { class: "down" }, `lost ${ago(since)}, `, ...by);
}

function crew(run, known) {
  const figures = run.status?.crew;
  if (!figures) return null;
  const held = new Set(figures.held ?? []);
  const rows = (figures.stages ?? []).map((seat, stage) => [
    `Stage ${stage}`, seat.layers?.[0] === seat.layers?.[1] ? String(seat.layers?.[0]) : (seat.layers ?? []).join("–"),
    seat.missing ? missingStage(seat.missing) : held.has(stage) ? element("span", {}, "this node") : named(seat.name, seat.peer),
    number(figures.replicas?.[stage]),
  ]);
  return foldable(run, known, "Stages",
    terms([
      ["Crew", `${number(figures.count)} stages, ${figures.whole ? "whole" : "not whole"}`],
      ["Led by", figures.lead ? (figures.lead.peer === run.status.peer ? "this node" : named(figures.lead.name, figures.lead.peer)) : "nobody yet"],
      ["Round", number(figures.round)],
      ["Updates", number(figures.updates)],
      ["Spares", number(figures.spares)],
      ["Lost so far", number(run.summary.last["stages/lost"] ?? 0)],
      ["Built so far", Object.entries(figures.recovered ?? {}).map(([way, n]) => `${number(n)} by ${way}`).join(", ") || "none"],
    ]),
    rows.length ? table(`Stages of ${run.id}`, ["Stage", "Layers", "Held by", "Copy here after update"], rows) : null);
}

const tools = { beginning, figure, foldable, named, narrow: NARROW, section, table, terms };

function drawSettings(known) {
  const tables = settingsTable(known, tools);
  find("config").hidden = !tables.length;
  find("config-title").textContent = settingsTitle(known);
  put(find("config-table"), ...tables);
}

// Events, the newest first. What a run says again, as at each start, is said once, with how often. The link to join is
// left out: it stands with the swarm, to copy.
function folded(events) {
  const found = new Map();
  for (const event of events) {
    if (event.kind === "join") continue;
    const same = found.get(event.text);
    if (same) Object.assign(same, { time: event.time, times: same.times + 1 });
    else found.set(event.text, { ...event, times: 1 });
  }
  return [...found.values()];
}

function drawEvents(known) {
  const all = known.flatMap((run) => folded(run.events).map((event) => ({ ...event, run }))).sort((a, b) => b.time - a.time);
  const shown = allEvents ? all : all.slice(0, NARROW ? 3 : FIRST);
  find("events").hidden = !all.length;
  const key = ({ run, time, text }) => JSON.stringify([run.id, time, text]);
  put(find("event-list"), ...shown.map((event) => element("li", { class: event.kind, "data-key": key(event) },
    element("time", { datetime: new Date(event.time * 1000).toISOString() }, clock(event.time)),
    known.length > 1 ? element("span", { class: `key ${event.run.color}` }, event.run.id) : null,
    element("span", { class: "text" }, event.kind === "summary" ? event.text.replace(/^(\S*) +(?<=^.{10})(?! )/gm, (_, word) => (word ? `${word}: ` : "  ")) : event.text, event.times > 1 ? element("small", {}, ` said ${event.times} times`) : null))));
  const more = find("more-events");
  more.hidden = all.length <= shown.length;
  more.textContent = `Show all ${all.length}`;
}

function clock(time) {
  const date = new Date(time * 1000), two = (n) => String(n).padStart(2, "0");
  const hours = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${hours}`;
}

// ------------------------------------------------------------------ begin

for (const [plan, chart] of drawn.filter(([plan]) => !plan.heldOut)) {
  chart.node.classList.toggle("wide", Boolean(plan.wide));
  find(plan.wide ? "first" : "charts").append(chart.node);
}
find("charts").append(...chosen.map(({ chart }) => chart.node));
for (const fold of document.querySelectorAll("details.fold")) fold.open = !NARROW;
for (const id of ["axis", "smoothing", "raw"]) find(id).addEventListener("change", redraw);
find("more-runs").addEventListener("click", () => {
  allRuns = true;
  drawRuns();
});
find("more-events").addEventListener("click", () => {
  allEvents = true;
  redraw();
});
addEventListener("hashchange", () => {
  if (fromAddress().join() !== selected.join() && fromAddress().length) select(fromAddress());
});
setInterval(redraw, 5000); // "… ago"

async function begin() {
  try {
    listed = await ask();
  } catch (error) {
    connection("lost", error instanceof Refused ? error.message : "no answer, trying again");
    setTimeout(begin, again());
    return;
  }
  const there = new Set(listed.map((run) => run.id)), asked = fromAddress().filter((id) => there.has(id));
  select(asked.length ? asked : first().map((run) => run.id));
  items.get(selected[0])?.node.scrollIntoView({ block: "nearest" });
}

// The newest run that goes on; the page of a swarm together with the run beside it.
function first() {
  const page = listed.find((run) => run.page), run = listed.find((run) => !run.page && (!page || run.in_use));
  return [page, run].filter(Boolean);
}

begin();
