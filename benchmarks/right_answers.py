"""Do right answers do harm that are chosen to? Liars in a swarm of honest nodes, in the simulator.

    python -m benchmarks.right_answers [--arms one creep] [--seeds 0 1] [--minutes 30]
    python -m benchmarks.right_answers --report

Honest peers are whole nodes with the starter, the task set `small` and default settings. Liars send ten groups a
second: seven right answers, plainly written unless the arm says otherwise, and a wrong one. Two groups of one slot are
admitted, and liars use both. Two of seven peers lie, or three of ten where an arm's name ends in `of ten`. All learn
with half the rate where it ends in `slow`:

    none            nobody lies: five honest peers; `none of ten`: seven
    plain           right answers to all that the liars are assigned
    one             only to questions whose right answer is 3, a tenth of all
    two, digits     only to those whose answer is 2 or 3, or has one digit: liars who know that answers are counted
    creep           the longest right answer of which each token is likely under an honest node's policy
    half            an answer half as much longer than the plain one as that
    below           the longest that is no longer than 95 % of that node's own right answers: liars who know lengths are

What has no row yet is run, seed by seed; `--minutes` begins no run after so many minutes. A row is a JSON file
under results/right_answers, written when its run ends. Figures of 1,050 held-out questions, asked of all honest peers:

    pass_1    share of right answers, one answer a question        tokens    mean length of an answer
    most      share of the commonest answer
    refused   share of the liars' groups that was refused for its proportions; refused_honest: of the honest peers'

The report has means over seeds, and differences to `none` of the same seeds: points of pass@1 with a 95 % bootstrap
interval, and how many times as long answers are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from benchmarks.common import RESULTS, machine, spent, table, write_row
from benchmarks.intervals import interval
from benchmarks.payload import ANSWERS, Liar
from swarm_node.config import NodeConfig
from swarm_node.grpo.trainer import default_learning_rate
from swarm_node.node import Node
from swarm_node.runtime.simulation import Peer, Simulation, manifest_for
from swarm_node.tasks.one_turn import prompt_digest
from swarm_node.tasks.taskset import has_signal, load_tasks, slot_key, slot_place
from swarm_node.types import Sampling, Task
from swarm_protocol.limits import GROUPS_PER_SLOT, SLOTS
from swarm_protocol.messages import SharedGroup, SharedRollout

FOLDER = RESULTS / "right_answers"
SEEDS, ROUNDS, QUESTIONS = (0, 1, 2, 3, 4), 120, 1050
LIKELY = -3.85  # log-probability above which no node's gate looks at a token
STEPS, BEAMS = 14, 24  # tokens of the longest answers that liars look for, and how many they follow
TEN = " of ten"
SLOW = " slow"
PEERS = {"": (5, 2), TEN: (7, 3), SLOW: (5, 2)}  # end of an arm's name -> honest peers, and liars


class Lie(NamedTuple):
    """What liars send."""

    answers: tuple[str, ...] = ()  # right answers of the questions that they answer; empty = all questions
    stretch: float = 0.0  # how far between the plain answer and the longest likely one theirs are
    known: bool = False  # whether none is longer than 95 % of own right answers


LIES = {
    "plain": Lie(),
    "one": Lie(("3",)),
    "two": Lie(("2", "3")),
    "digits": Lie(tuple("0123456789")),
    "creep": Lie(stretch=1.0),
    "half": Lie(stretch=0.5),
    "below": Lie(stretch=1.0, known=True),
}
ARMS = [f"{name}{end}" for end in PEERS for name in ("none", *LIES)]


class Watched(Node):
    """An honest node whose latest right answers are known to liars."""

    lengths: list[int]

    def share(self, collected: Any) -> None:
        taught = [group for group in collected.groups if has_signal(group.rollouts)]
        right = [len(r.token_ids) for group in taught for r in group.rollouts if r.correct]
        self.lengths = (right + getattr(self, "lengths", []))[:512]
        super().share(collected)


class Chooser(Liar):
    """A liar that chooses which questions it answers, and how long its right answers are."""

    def __init__(self, simulation: Simulation, seed: int, number: int, lie: Lie) -> None:
        super().__init__(simulation, seed, number, lambda answer: answer)
        self._lie, self._times = lie, 0
        self._victim: Watched = simulation.peers[0].node  # type: ignore[assignment]
        self._chosen: tuple[int, Task, str] | None = None

    def _group(self, epoch: int) -> SharedGroup:
        if epoch != self._epoch:
            self._epoch, self._slot, self._chosen = epoch, -1, None
        if self._chosen is None or self._times == GROUPS_PER_SLOT:
            self._chosen, self._times = self._choose(epoch), 0
        self._times += 1
        slot, task, right = self._chosen
        texts = [right] * (ANSWERS - 1) + [str(self._rng.randrange(1000, 9999))]
        rollouts = [SharedRollout.of(text, True) for text in texts]
        return SharedGroup(task.name, epoch, slot, prompt_digest(task.question), 7, rollouts)

    def _choose(self, epoch: int) -> tuple[int, Task, str]:
        """The next slot whose question suits, its task, and the answer to it."""
        for _ in range(SLOTS):
            self._slot = (self._slot + 1) % SLOTS
            which = self._simulation.manifest.swarm_id, self.identity.peer_id, epoch, self._slot
            task = self._tasks.at(slot_place(*which), slot_key(*which))
            if not self._lie.answers or task.answer in self._lie.answers:
                break
        assert task.answer is not None
        return self._slot, task, self._long(task, task.answer) if self._lie.stretch else task.answer

    def _long(self, task: Task, plain: str) -> str:
        """The right answer whose length is nearest below what the lie asks for."""
        policy = self._victim.policy
        found = {len(ids): policy.decode(ids) for ids in self._likely(task)}
        least = len(policy.encode_completion(plain, False) or ())
        most = least + self._lie.stretch * (max(found, default=least) - least)
        if self._lie.known and (lengths := sorted(getattr(self._victim, "lengths", []))):
            most = min(most, lengths[int(0.95 * len(lengths))] - 1)
        fitting = [length for length in found if length <= most]
        return found[max(fitting)] if fitting else plain

    def _likely(self, task: Task) -> list[list[int]]:
        """Right answers of different lengths of which every token is likely, found beam by beam."""
        policy, beams, right = self._victim.policy, [[]], []  # type: ignore[var-annotated]
        prompt = policy.encode(self._tasks.prompt(task))
        for _ in range(STEPS):
            rows = torch.tensor([[*prompt, *beam] for beam in beams])
            with torch.no_grad():
                logprobs = torch.log_softmax(policy.model(rows).logits[:, -1].float(), -1)
            grown = []
            for beam, row in zip(beams, logprobs, strict=True):
                for token in (row > LIKELY).nonzero()[:, 0].tolist():
                    if token != policy.eos_id:
                        grown.append([*beam, token])
                    elif beam and self._tasks.score([task], [""], [policy.decode(beam)])[0].correct:
                        right.append(beam)
            if not grown:
                break
            self._rng.shuffle(grown)
            beams = grown[:BEAMS]
        return right


# --------------------------------------------------------------------- a run


def parts(arm: str) -> tuple[str, str]:
    """An arm's name, taken apart: the lie, or `none`, and its end."""
    end = next((end for end in (TEN, SLOW) if arm.endswith(end)), "")
    return arm.removesuffix(end), end


def run(arm: str, seed: int, rounds: int = ROUNDS, questions: int = QUESTIONS) -> dict[str, Any]:
    """One simulation: its figures."""
    name, end = parts(arm)
    honest, liars = PEERS[end]
    settings: dict[str, Any] = {"tasks": ["small"], "policy": {"model": "starter", "threads": 1}}
    if end == SLOW:
        settings["grpo"] = {"learning_rate": default_learning_rate(lora=False, trained=1) / 2}
    config = NodeConfig.model_validate(settings)
    simulation = Simulation(manifest_for(config), [Peer(config, node_type=Watched) for _ in range(honest)], seed=seed)
    crowd = [] if name == "none" else [Chooser(simulation, seed, number, LIES[name]) for number in range(liars)]
    nodes = [peer.node for peer in simulation.peers]
    began = time.process_time()
    simulation.run(rounds=rounds)
    found = held_out(nodes, questions // honest)
    return {
        "arm": arm,
        "seed": seed,
        "rounds": rounds,
        **found,
        "refused": refused(nodes, [liar.identity.peer_id for liar in crowd]),
        "refused_honest": refused(nodes, [node.member.peer_id for node in nodes if node.member]),
        "cpu_s": round(time.process_time() - began, 1),
    }


def refused(nodes: Sequence[Node], senders: Sequence[str]) -> float | None:
    """The share of the groups of `senders` that was refused for its answer or its length, by all nodes; None without
    groups."""
    accounts = [node.member.receiver.by_peer() for node in nodes if node.member is not None]
    known = [found[sender] for found in accounts for sender in senders if sender in found]
    out = sum(account["rejected"].get("balance", 0) for account in known)
    taken = sum(account["admitted"] for account in known)
    return out / (out + taken) if out + taken else None


def held_out(nodes: Sequence[Node], questions: int) -> dict[str, Any]:
    """Answers of all nodes to `questions` held-out questions each."""
    right: list[bool] = []
    lengths: list[int] = []
    texts: Counter[str] = Counter()
    for node in nodes:
        tasks = load_tasks(["small"], node.config.rewards).held_out(questions)
        prompts = node.policy.encode_questions([task.question for task in tasks])
        answers = [a for (a,) in node.policy.generate(prompts, 1, Sampling(32), list(range(len(prompts))))]
        scores = node.tasks.score(tasks, [""] * len(tasks), [answer.text for answer in answers])
        right += [score.correct for score in scores]
        lengths += [len(answer.token_ids) for answer in answers]
        texts.update(answer.text for answer in answers)
    (text, times), *_ = texts.most_common(1)
    return {"pass_1": fmean(right), "tokens": fmean(lengths), "most": times / texts.total(), "commonest": text}


# --------------------------------------------------------------------- files


def path_of(arm: str, seed: int) -> Path:
    return FOLDER / f"{arm.replace(' ', '-')}-{seed}.json"


def run_missing(arms: Sequence[str], seeds: Sequence[int], minutes: float) -> None:
    """Run what has no row yet; begin nothing after `minutes`."""
    until = time.monotonic() + 60 * minutes
    for seed in seeds:
        for arm in arms:
            path = path_of(arm, seed)
            if path.exists() or time.monotonic() > until:
                continue
            figures = run(arm, seed)
            write_row(path, figures | {"machine": machine()}, indent=1)
            print(f"{path.stem}  pass@1 {figures['pass_1']:.3f}  {figures['cpu_s']} CPU s", flush=True)


def report() -> str:
    """A Markdown table: each arm's means, and its differences to the run of the same seed without liars."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        row = json.loads(path.read_text())
        found.setdefault(row["arm"], {})[row["seed"]] = row
    rows: list[list[Any]] = []
    for arm in (arm for arm in ARMS if arm in found):
        runs, base = found[arm], found.get(f"none{parts(arm)[1]}", {})
        seeds = sorted(runs.keys() & base.keys())
        points = interval([100 * (runs[s]["pass_1"] - base[s]["pass_1"]) for s in seeds], "+.1f") if seeds else ""
        longer = f"{fmean(runs[s]['tokens'] / base[s]['tokens'] for s in seeds):.2f}" if seeds else ""
        means = [fmean(run[name] for run in runs.values()) for name in ("pass_1", "tokens", "most")]
        shares = [[run[name] for run in runs.values()] for name in ("refused", "refused_honest")]
        shown = [f"{100 * means[0]:.1f}", f"{means[1]:.1f}", f"{100 * means[2]:.1f}"]
        is_base = arm.startswith("none")
        rows.append(
            [
                arm,
                ", ".join(map(str, sorted(runs))),
                *shown,
                "" if is_base else points,
                "" if is_base else longer,
                *(f"{100 * fmean(share):.0f}" if None not in share else "" for share in shares),
            ]
        )
    columns = ["arm", "seeds", "pass@1, %", "tokens", "commonest, %", "points", "times as long", "refused, %", "honest"]
    every = [run["cpu_s"] for runs in found.values() for run in runs.values()]
    return f"{table(columns, rows)}\n\n{spent(sum(every))}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--report", action="store_true", help="a table of all that has been run")
    args = parser.parse_args(argv)
    if not args.report:
        torch.set_num_threads(1)
        run_missing(args.arms, args.seeds, args.minutes)
    print(text := report())
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "report.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
