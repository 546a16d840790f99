// Questions with what was answered: the newest ones, and held-out ones before and after training.
// Texts come from models and strangers: they are only ever set as text, in <bdi>, so that none turns what stands beside it around.

import { fixed, number } from "./chart.js";
import { element } from "./nodes.js";

const sign = (value) => (value > 0 ? "up" : value < 0 ? "down" : null);
const verdict = (correct) => (correct === null ? null : correct ? "up" : "down");

// By the reward that counts: what the checker says or, where that does not count, the mean reward of the question.
function answer({ text, judged, reward, times, correct, cut }, mean) {
  const notes = [times > 1 ? `${times} times` : "", cut ? "cut off" : "", judged === null ? "no answer found" : judged !== text.trim() ? `judged: ${judged}` : ""];
  return element("li", {},
    element("span", { class: mean === null ? verdict(correct) : sign(reward - mean) }, reward.toFixed(2)), " ",
    element("bdi", { class: "text" }, text || "(empty)"),
    ...notes.filter(Boolean).map((note) => element("small", {}, ` · ${note}`)));
}

function group(run, sample, named) {
  const name = run.status?.peers?.[sample.peer]?.name, shown = sample.answers.reduce((sum, one) => sum + one.times, 0);
  const mean = run.summary.figure === "reward" ? sample.reward : null;
  const own = sample.peer === null, whose = own ? "own" : named(name, sample.peer);
  const rated = own ? `mean reward ${sample.reward.toFixed(2)}` : `${number(shown)} answer${shown === 1 ? "" : "s"} kept`;
  return element("article", { class: "sample" },
    element("p", { class: "head" }, element("b", {}, element("bdi", {}, sample.task)), ` round ${number(sample.round)} · `, whose, ` · ${rated}`),
    element("p", { class: "text" }, element("bdi", {}, sample.question)),
    sample.right === null ? null : element("p", { class: "right" }, "right: ", element("bdi", { class: "text" }, sample.right)),
    element("ul", {}, ...sample.answers.map((one) => answer(one, mean))),
    sample.of > shown ? element("p", { class: "right" }, `and ${number(sample.of - shown)} more answers`) : null);
}

export function samples(run, known, { beginning, narrow, section, named }) {
  if (!run.samples?.length) return null;
  const label = `Answers of ${run.id}`, [shown, more] = beginning(label, run.samples, narrow ? 2 : run.samples.length);
  const region = { class: "samples", role: "region", "aria-label": label, tabindex: "0" };
  return section(run, known, "Questions and answers", element("div", region, ...shown.map((sample) => group(run, sample, named))), more);
}

// One answer to a held-out question, and how many of all answers were right; where rewards count, whether it `rose`.
function tried(when, text, correct, reward, mean, { figure, samples }, rose = 0) {
  const judged = figure === "reward" ? `reward ${reward.toFixed(2)}, mean ${mean.toFixed(2)}` : `${Math.round(mean * samples)} of ${number(samples)} right`;
  return element("li", {}, element("small", {}, `${when}: `),
    element("bdi", { class: figure === "reward" ? sign(rose) : verdict(correct) }, text || "(empty)"), element("small", {}, ` · ${judged}`));
}

// Held-out figures by task, and the most, the middle and the least improved question, before training and at the latest evaluation.
export function beforeAndAfter(run, known, { section, table }) {
  const found = run.heldOut, after = `after round ${number(found?.points.at(-1)?.round ?? 0)}`;
  if (!found?.tasks.length || known.length > 1) return null; // of several runs, the table of key figures compares them
  const name = found.figure === "reward" ? "mean reward" : "pass@1, the share of right answers,";
  const titles = ["Task", "Questions", "Before training", after[0].toUpperCase() + after.slice(1)];
  const rows = found.tasks.map((each) => [each.task, number(each.questions), fixed(each.before), fixed(each.after)]);
  const places = { 2: ["most improved", "least improved"], 3: ["most improved", "in the middle", "least improved"] }[found.answers.length] ?? [];
  const cards = found.answers.map((one, i) => element("article", { class: "sample" },
    element("p", { class: "head" }, element("b", {}, element("bdi", {}, one.task)), places[i] ? ` ${places[i]}` : null),
    element("p", { class: "text" }, element("bdi", {}, one.question)),
    one.right ? element("p", { class: "right" }, "right: ", element("bdi", { class: "text" }, one.right)) : null,
    element("ul", {}, tried("before", one.before, one.before_correct, one.before_reward, one.mean_before, found),
      tried(after, one.after, one.after_correct, one.after_reward, one.mean_after, found, one.after_reward - one.before_reward))));
  return section(run, known, "Held-out questions",
    element("p", {}, element("small", {}, `${found.own_tasks ? "Of eval.tasks" : "Never trained on"}: ${name} by task. Below, ${found.samples === 1 ? "the answer" : `the first of ${number(found.samples)} answers`} to three of ${number(found.answers_of)} questions.`)),
    table(`Held-out questions of ${run.id}`, titles, rows, found.tasks.map((each) => each.task)),
    cards.length ? element("div", { class: "samples" }, ...cards) : null);
}
