// A swarm as a whole: its members and what they say of themselves, and how to join it; what it gave one of its members.

import { ago, Chart, duration, number } from "./chart.js";
import { element } from "./nodes.js";

const CLAIMED = "self-declared";

const percent = (part) => `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)} %`;
const share = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
// A card has 0 until its member has ended a round.
const speed = (value) => number(Math.round(value) || null);
const updates = (row) => number(row.updates || (row.tokens_per_s ? 0 : null));
const short = (peer) => `…${String(peer).slice(-8)}`;

// How old the oldest word of a member is; empty if unknown, as in files of earlier versions.
export const asOf = (page) => (page?.as_of ? `as of ${ago(page.as_of)}` : "");

const note = (page) => `What members say of themselves${page.as_of ? `, ${asOf(page)}` : ""}; nobody checks it.`;

// Success of one member over its kinds of task, each weighing the same.
function success(declared) {
  return mean(Object.values(declared?.kinds ?? {}).map(([answers, right]) => right / answers));
}

function bar(value) {
  const inner = element("span", { class: "fill" });
  inner.style.width = `${100 * Math.min(1, Math.max(0, value))}%`;
  return element("span", { class: "bar", "aria-hidden": "true" }, inner);
}

function hash(text) {
  let value = 0;
  for (const letter of text) value = (value * 31 + letter.codePointAt(0)) % 1e9;
  return value;
}

function kinds(run, page, { table }) {
  if (!page.kinds?.length) return null;
  const rows = page.kinds.map(({ kind, members, success, share: part }) => [
    String(kind),
    success ? element("span", { class: "barred" }, share(success), bar(success)) : element("span", { class: "down" }, "nobody solves it"),
    percent(part),
    number(members),
  ]);
  return table(`Kinds of task in the swarm of ${run.id}`, ["Kind of task", "Success", "Of all answers", "Members that say so"], rows, page.kinds.map((row) => row.kind));
}

function members(run, page, own, { table }) {
  if (!page.rows?.length) return null;
  const rows = page.rows.map((row) => [
    element("span", {}, String(row.name || "a peer"), " ", element("code", { title: row.peer }, short(row.peer)), own.has(row.peer) ? " yours" : null),
    (row.roles ?? []).join(", "),
    updates(row),
    speed(row.tokens_per_s),
    row.declared?.since ? duration(Date.now() / 1000 - row.declared.since) : "–",
    String(row.declared?.version ?? "–"),
    share(success(row.declared)),
    share(row.declared?.pass_1),
  ]);
  return table(`Members of ${run.id}`, ["Member", "Role", "Updates", "Tokens/s", "Here for", "Version", "Success", "Held-out pass@1"], rows, page.rows.map((row) => row.peer));
}

export function copyable(text) {
  return element("p", { class: "copyable" }, element("code", {}, text), " ", element("button", { type: "button", "data-copy": text }, "Copy"));
}

function joining(run, page) {
  if (!page.link) return null;
  const several = page.link.includes("&");
  const code = element("figure", { class: "qr" },
    element("img", { src: `api/qr/${encodeURIComponent(run.id)}?${hash(page.link)}`, alt: "QR code of the join link", width: 180, height: 180 }),
    element("figcaption", {}, several ? "The link with its first address" : "The link"));
  return element("div", { class: "joining" }, code,
    element("div", {}, element("p", {}, "Join with:"), copyable(`swarm-node join '${page.link}'`)));
}

// Figures of the runs of this machine that are shown beside the page.
function mine(page, own, known, { figure }) {
  const rows = (page.rows ?? []).filter((row) => own.has(row.peer));
  if (!rows.length || !page.tokens_per_s) return [];
  const speed = rows.reduce((sum, row) => sum + row.tokens_per_s, 0);
  const used = known.map((run) => run.status?.worth?.share_of_used).find((value) => value !== undefined && value !== null);
  return [figure("Your share", "own_share", percent(speed / page.tokens_per_s), "of the tokens", used === undefined ? null : `${percent(used)} of what others used (${CLAIMED})`)];
}

// Means over members, each of which says them of itself, since this page is written: [time, success, held-out pass@1].
function historyOf(page) {
  const points = page?.history ?? [];
  return [["success", "c0"], ["held-out pass@1", "c1"]].map(([label, color], i) => {
    const known = points.filter((point) => (point[i + 1] ?? null) !== null);
    return { label, color, x: known.map((point) => point[0] - points[0][0]), y: known.map((point) => point[i + 1]), raw: null };
  }).filter((line) => line.x.length > 1);
}

const placeOf = (run) => `means of ${run.id}`;
const charts = new Map(); // id of a run -> its chart, which stays while the sections around it are made anew

// Draw the means over time in the places that `swarmPage` leaves for them.
export function drawMeans(runs) {
  for (const run of runs) {
    const place = document.querySelector(`[data-key="${CSS.escape(placeOf(run))}"]`);
    if (!place) continue;
    if (!charts.has(run.id)) charts.set(run.id, new Chart("Means over members", { height: 170 }));
    const chart = charts.get(run.id);
    if (chart.node.parentNode !== place) place.replaceChildren(chart.node);
    chart.show(historyOf(run.status.page), { axis: "time", format: share });
  }
}

function listing(page) {
  const left = page.members - (page.rows ?? []).length;
  return `Names, speeds and what stands from “Here for” on are ${CLAIMED}${page.as_of ? `, ${asOf(page)}` : ""}.${left > 0 ? ` ${number(left)} more are not listed.` : ""}`;
}

// The page of a swarm, for a directory that has nothing else.
export function swarmPage(run, known, tools) {
  const { status } = run, page = status?.page, name = status?.swarm_name || run.id;
  const title = element("h2", { class: "run" }, `Swarm ${name} `, String(status?.swarm ?? "").startsWith(name) ? null : element("small", { title: status?.swarm }, `id ${String(status?.swarm ?? "").slice(0, 16)}`));
  if (!page) return [title, element("p", {}, "Looking for members, a few seconds.")];
  const same = known.filter((other) => other.status?.swarm === status.swarm);
  const own = new Set(same.map((other) => other.status.peer).filter(Boolean));
  const all = mean((page.kinds ?? []).map((row) => row.success)), unsolved = (page.kinds ?? []).filter((row) => !row.success).length;
  const { figure, section } = tools;
  const tiles = element("dl", { class: "tiles" },
    figure("Members", "members", number(page.members), `${number(page.training)} of them training`, asOf(page)),
    figure("Tokens a second", "tokens_per_s", speed(page.tokens_per_s), "sampled by all"),
    figure("Success", "success", share(all), page.declaring ? `over kinds of task, ${CLAIMED} by ${number(page.declaring)}` : "no member tells yet"),
    figure("Solved by nobody", "unsolved", page.kinds?.length ? number(unsolved) : "–", page.kinds?.length ? `of ${number(page.kinds.length)} kinds` : "no member tells yet"),
    ...mine(page, own, same, tools));
  const parts = [
    ["Over time", historyOf(page).length ? element("div", { "data-key": placeOf(run), "data-kept": true }) : null, "What members say of themselves, since this page began."],
    ["Kinds of task", kinds(run, page, tools), note(page)],
    ["Members", members(run, page, own, tools), listing(page)],
    ["Join", joining(run, page), null],
  ];
  return [title, tiles, ...parts.filter(([, part]) => part).map(([heading, part, note]) =>
    section(run, [run], heading, note ? element("p", {}, element("small", {}, note)) : null, part))];
}

const course = ({ first, now }) => `${share(first)} → ${share(now)}`;

// Own success on kinds of task that others taught, with that on the other kinds to compare.
function taught(byOthers, byItself) {
  if (!byOthers) return null;
  const kinds = byOthers.kinds.slice(0, 6).join(", ") + (byOthers.kinds.length > 6 ? ", …" : "");
  return ["Success on kinds taught mostly by others", course(byOthers), kinds + (byItself ? `; on all other kinds ${course(byItself)}` : "")];
}

function rowsOf(rows) {
  return rows.filter(Boolean).map(([term, value, more]) => [term, element("span", {}, value, " ", element("small", {}, more ?? ""))]);
}

// What the swarm gave a run: docs/sharing.md has the definitions.
export function worth(run, known, { section, terms }) {
  const found = run.status?.worth, { own, foreign } = run.summary;
  if (!found) return null;
  const mine = found.own_groups ?? 0, others = found.others_groups ?? 0, theirs = found.theirs ?? [];
  const [low, high] = [theirs[0], theirs.at(-1)].map(share), age = run.summary.over ? "" : asOf(run.status.page);
  const pairs = rowsOf([
    foreign && !others ? ["Groups of others trained on", number(foreign), `${percent(foreign / (own + foreign))} of all`] : null,
    others ? ["Groups with something to learn", `${number(others)} of ${number(mine + others)} from others`, percent(others / (mine + others))] : null,
    foreign || found.unsolved ? ["Questions only others solved", number(found.unsolved ?? 0), found.unsolved ? "its own latest answers to their kind were all wrong" : ""] : null,
    taught(found.by_others, found.by_itself),
    theirs.length ? ["Held-out pass@1 of others", low === high ? low : `${low} to ${high}`, [`${CLAIMED} by ${number(theirs.length)}`, age].filter(Boolean).join(", ")] : null,
  ]);
  return section(run, known, "What the swarm gave", pairs.length ? terms(pairs) : element("p", {}, "Nothing so far: this node has trained on no group of another member."));
}

// What a run gave the swarm.
export function gave(run, known, { section, terms }) {
  const found = run.status?.worth, sent = run.status?.sent?.["swarm/groups_sent"];
  if (!found) return null;
  const part = found.share_of_used ?? 1; // the share of one of two trainers is always whole
  const pairs = rowsOf([
    sent ? ["Groups published", number(sent), "since this start"] : null,
    found.used_by_others ? ["Others trained on", `at least ${number(found.used_by_others)} of its groups`, CLAIMED] : null,
    part < 0.995 ? ["Its share of what others use", percent(part), `${CLAIMED} by ${number(found.declaring)}`] : null,
  ]);
  return pairs.length ? section(run, known, "What it gave others", terms(pairs)) : null;
}

// The swarm of a run: success of all members by kind of task, and the link, unless the run has left it.
export function swarmOf(run, known, tools) {
  const { page, link } = run.status ?? {}, { over } = run.summary;
  const table = page && kinds(run, page, tools), code = over ? null : joining(run, { link: page?.link ?? link });
  if (!table && !code) return null;
  const said = table ? element("p", {}, element("small", {}, over ? `As it was when the run ended. ${note({})}` : note(page))) : null;
  return tools.foldable(run, known, "The swarm", said, table, code);
}

// Copy what a button names; a page that came unencrypted from another machine may not, so its text is selected.
addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(button.parentNode.querySelector("code"));
    button.textContent = "Selected: copy it";
  }
});
