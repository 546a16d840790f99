// Questions with what was answered, the newest first.
// Texts come from models and strangers: they are only ever set as text.

import { number } from "./chart.js";
import { element } from "./nodes.js";

function answer({ text, judged, reward, times, correct, cut }) {
  const notes = [times > 1 ? `${times} times` : "", cut ? "cut off" : "", judged === null ? "no answer found" : judged !== text.trim() ? `judged: ${judged}` : ""];
  return element("li", {},
    element("span", { class: correct === null ? null : correct ? "up" : "down" }, reward.toFixed(2)), " ",
    element("span", { class: "text" }, text || "(empty)"),
    ...notes.filter(Boolean).map((note) => element("small", {}, ` ${note}`)));
}

function group(run, sample, named) {
  const name = run.status?.peers?.[sample.peer]?.name, shown = sample.answers.reduce((sum, one) => sum + one.times, 0);
  const whose = sample.peer === null ? "own" : named(name, sample.peer);
  return element("article", { class: "sample" },
    element("p", { class: "head" }, element("b", {}, sample.task), ` round ${number(sample.round)} · `, whose, ` · mean reward ${sample.reward.toFixed(2)}`),
    element("p", { class: "text" }, sample.question),
    sample.right === null ? null : element("p", { class: "right" }, "right: ", element("span", { class: "text" }, sample.right)),
    element("ul", {}, ...sample.answers.map(answer)),
    sample.of > shown ? element("p", { class: "right" }, `and ${number(sample.of - shown)} more answers`) : null);
}

export function samples(run, known, { section, named }) {
  if (!run.samples?.length) return null;
  const region = { class: "samples", role: "region", "aria-label": `Answers of ${run.id}`, tabindex: "0" };
  return section(run, known, "Questions and answers", element("div", region, ...run.samples.map((sample) => group(run, sample, named))));
}
