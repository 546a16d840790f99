"""What a partner does that goes uphill within the clip, to nodes that average in pairs.

    python -m benchmarks.averaging_uphill [--arms uphill below …] [--seeds 0 1 2 3 4] [--rounds 120] [--rate 3e-4]
                                          [--minutes 60]
    python -m benchmarks.averaging_uphill --report

Three honest nodes train the starter policy on right answers to `small` (next-token loss, Adam, 5 steps a round). They
meet in pairs, drawn anew each round, a fourth peer included: a liar. Where an arm's name ends in `of ten`, seven honest
nodes and three liars. Each node judges its partner with the code of `Node`: clip, gates, probes and costs, with the
defaults. It samples four groups of answers a round, and keeps some of them back to judge by, as `Node` does and when.
A liar has its partner's weights before it answers, and sends them moved in the direction in which the partner's loss on
public questions grows fastest:

    none        nobody averages with liars
    whole       likewise, and all honest nodes average at once
    uphill      as far as the clip lets pass
    below       as far as the probe still allows; it knows what its partner has it down for
    alternate   in turn the weights of another honest node, and as `below`
    identities  as `below`, with another of five identities each time

Figures: pass@1 of the honest nodes on 1,050 held-out questions together; their loss on right answers; exchanges
applied whole and in part, and refused by gates and by probes; where nobody lies, what exchanges cost by the answers
that were kept back: mean, spread, and correlation with the node's exchange before. One JSON line a run under
results/averaging/uphill; what is there is not run again, and none begins after so many minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median_low, pstdev
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import machine, table, write_row
from benchmarks.intervals import interval
from swarm_node.averaging.costs import EVERYBODY, allowance
from swarm_node.averaging.outer_step import NoLoCo, slow_minus_fast
from swarm_node.averaging.probing import Probes
from swarm_node.averaging.robust import Robust
from swarm_node.config import NodeConfig
from swarm_node.grpo.trainer import Trainer
from swarm_node.node import fitted
from swarm_node.policy.loading import load_policy
from swarm_node.rollouts import collect
from swarm_node.rollouts.probe_answers import ProbeAnswers, reference_answers
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Group, Sampling, Task

FOLDER = Path(__file__).parent / "results" / "averaging" / "uphill"
TEN = " of ten"
PEERS = {"": (3, 1), TEN: (7, 3)}  # honest nodes, and liars
ARMS = [f"{name}{size}" for size in PEERS for name in ("none", "whole", "uphill", "below", "alternate", "identities")]
NOBODY_LIES = "none", "whole"
STEPS, BATCH, OWN, HELD_OUT = 5, 24, 4, 1050
SIZES = 0.99, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.0  # of what the clip lets pass
IDENTITIES = 5


class World:
    """The one model in memory, into which each node's weights are put in turn, and the questions."""

    def __init__(self) -> None:
        options = {"tasks": ["small"], "policy": {"model": "starter", "threads": 1}, "rollouts": {"groups": OWN}}
        config = NodeConfig.model_validate(options)
        self.averaging = config.averaging
        self.policy = load_policy(config.policy, config.rollouts, lambda said: None)
        self.tasks = load_tasks(["small"], config.rewards)
        config = fitted(config, self.policy, lambda said: None)
        self.rollouts = config.rollouts
        sampling = Sampling(self.rollouts.max_new_tokens)
        self.trainer = Trainer(self.policy, config.grpo, sampling, lambda said: None, self.tasks.reward_weights)
        self.params = [p for p in self.policy.model.parameters() if p.requires_grad]
        self.start = torch.cat([p.data.flatten() for p in self.params])

    def put(self, weights: Tensor) -> None:
        for p, values in zip(self.params, weights.split([p.numel() for p in self.params]), strict=True):
            p.data.copy_(values.view_as(p))

    def _mean_nll(self, tasks: Sequence[Task]) -> Tensor:
        prompts = self.policy.encode_questions([task.question for task in tasks])
        rows = [
            (q, self.policy.encode_completion(t.answer or "", True) or []) for q, t in zip(prompts, tasks, strict=True)
        ]
        longest = max(len(q) + len(a) for q, a in rows)
        ids = torch.tensor([q + a + [self.policy.pad_id] * (longest - len(q) - len(a)) for q, a in rows])
        at = torch.arange(longest)
        ends = torch.tensor([len(q) + len(a) for q, a in rows])[:, None]
        answer = (at >= torch.tensor([len(q) for q, _ in rows])[:, None]) & (at < ends)
        logits = self.policy.model(ids, attention_mask=(at < ends).long()).logits[:, :-1].float()
        nll = -torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        return nll[answer[:, 1:]].mean()

    def loss(self, weights: Tensor, tasks: Sequence[Task]) -> float:
        self.put(weights)
        with torch.no_grad():
            return float(self._mean_nll(tasks))

    def gradient(self, weights: Tensor, tasks: Sequence[Task]) -> Tensor:
        self.put(weights)
        for p in self.params:
            p.grad = None
        self._mean_nll(tasks).backward()
        return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.params])

    def sample(self, weights: Tensor, rng: random.Random) -> list[Group]:
        """Scored answers of a round."""
        self.put(weights)
        draw = partial(self.tasks.sample, rng)
        return collect(self.policy, draw, self.tasks, self.rollouts, str(rng.random())).groups

    def nll(self, weights: Tensor, groups: Sequence[Group]) -> float | None:
        """As `Node` computes it for its probes."""
        self.put(weights)
        return self.trainer.mean_nll(groups) if groups else None

    def right(self, weights: Tensor, tasks: Sequence[Task]) -> list[bool]:
        self.put(weights)
        prompts = self.policy.encode_questions([task.question for task in tasks])
        answers = self.policy.generate(prompts, 1, Sampling(16), list(range(len(prompts))))
        scores = self.tasks.score(tasks, [""] * len(tasks), [each[0].text for each in answers])
        return [score.correct for score in scores]


class Honest:
    def __init__(self, world: World, seed: str, rate: float) -> None:
        self.world, self.rate, self.rng = world, rate, random.Random(seed)
        self.fast, self.slow = world.start.clone(), world.start.clone()
        self.outer_momentum, self.first, self.second = (torch.zeros_like(self.fast) for _ in range(3))
        self.updates = 0
        self.robust = Robust(world.averaging.clip, world.averaging.gates)
        self.answers = ProbeAnswers(partial(reference_answers, world.policy, world.tasks, world.rollouts))
        self.averaged = self.fast  # the weights that are judged
        self.probes = Probes(
            lambda: world.nll(self.averaged, self.answers.trained),
            unseen=lambda: world.nll(self.averaged, self.answers.small_costs),
        )
        self.counts: Counter[str] = Counter()
        self.costs: list[float] = []  # of all exchanges that were judged by answers that were kept back

    def train(self) -> None:
        groups = self.world.sample(self.fast, self.rng)
        kept_back = self.answers.keep_back(groups)
        self.answers.trained_on(group for group in groups if group is not kept_back)
        for _ in range(STEPS):
            gradient = self.world.gradient(self.fast, self.world.tasks.sample(self.rng, BATCH))
            self.updates += 1
            self.first.lerp_(gradient, 0.1)
            self.second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            first, second = self.first / (1 - 0.9**self.updates), self.second / (1 - 0.99**self.updates)
            self.fast -= self.rate * first / (second.sqrt() + 1e-8)

    def exchange(self, partner: str, theirs: Tensor) -> None:
        """As `PairAverager` does it, in one piece."""
        averaging, fast, theirs = self.world.averaging, self.fast.clone(), theirs.clone()
        verdict = self.robust.check(0, fast, self.slow, theirs)
        self.robust.remember(0, verdict)
        if verdict.refused:
            self.counts["gates"] += 1
            return
        outer = NoLoCo(averaging.alpha, averaging.beta, averaging.gamma)
        outer.momentum_in_place(self.slow, self.outer_momentum, fast, theirs)
        slow_minus_fast(self.slow, theirs, fast)
        self.averaged = self.fast
        before = self.probes.losses()
        self.averaged = self.fast + fast

        def halve() -> None:
            self.averaged = (self.averaged + self.fast) / 2

        part, cheap, _ = self.probes.judge(self.robust, partner, before, halve)
        if before[1] is not None:
            self.costs.append(self.robust.costs.state()["last"][-1])
        if not part:
            self.counts["probe"] += 1
            return
        theirs -= (1 - part) * fast
        self.fast, self.slow, self.outer_momentum = self.averaged, self.slow + theirs, theirs
        self.counts["applied" if part == 1 else "in part"] += 1
        self.robust.accept(0, verdict, cheap)


class Liar:
    def __init__(self, world: World, arm: str, seed: int, number: int) -> None:
        self.world, self.arm, self.name = world, arm, f"liar {number}"
        self.rng = random.Random(f"liar/{seed}/{number}")
        self.told: Counter[int] = Counter()  # honest node -> answers so far

    def answers(self, number: int, nodes: Sequence[Honest]) -> tuple[str, Tensor]:
        """(its identity, the weights that it sends to node `number`)."""
        victim, turn = nodes[number], self.told[number]
        self.told[number] += 1
        name = f"{self.name}.{turn % IDENTITIES}" if self.arm == "identities" else self.name
        if self.arm == "alternate" and turn % 2 == 0:
            return name, nodes[(number + 1) % len(nodes)].fast
        seen = victim.robust.state()["seen"].get("0", {"distances": []})["distances"]
        usual = max(median_low(seen or [0.0]), float((victim.fast - victim.slow).norm()))
        public = self.world.tasks.sample(self.rng, 32)
        gradient = self.world.gradient(victim.fast, public)
        uphill = gradient.sign() * gradient.abs().sqrt()
        uphill *= self.world.averaging.clip * usual / uphill.norm()
        if self.arm == "uphill":
            return name, victim.fast + SIZES[0] * uphill
        own, costs = self.world.loss(victim.fast, public), victim.robust.costs
        allowed = allowance(own)
        left = min(costs.rooms(name, allowed)) + costs.usual(allowed)
        cost = lambda size: self.world.loss(victim.fast + size / 2 * uphill, public) - own  # noqa: E731
        size = next((size for size in SIZES if cost(size) <= 0.9 * left), 0.0)
        return name, victim.fast + size * uphill


def run(world: World, arm: str, seed: int, rounds: int, rate: float) -> dict[str, Any]:
    began = time.process_time()
    lie, (honest, crowd) = arm.removesuffix(TEN), PEERS[TEN if arm.endswith(TEN) else ""]
    nodes = [Honest(world, f"{seed}/{i}", rate) for i in range(honest)]
    liars = [Liar(world, lie, seed, i) for i in range(crowd)]
    pairing = random.Random(seed)
    for _ in range(rounds):
        for node in nodes:
            node.train()
        order = list(range(honest + crowd))
        pairing.shuffle(order)
        sent = [node.fast for node in nodes]
        if lie == "whole":
            mean = torch.stack(sent).mean(0)
            for node in nodes:
                node.exchange(EVERYBODY, 2 * mean - node.fast)  # the middle of the two is the mean of all
            continue
        for a, b in zip(order[::2], order[1::2], strict=True):
            for mine, other in ((a, b), (b, a)):
                if mine < honest and (other < honest or lie not in NOBODY_LIES):
                    name, theirs = (
                        (str(other), sent[other]) if other < honest else liars[other - honest].answers(mine, nodes)
                    )
                    nodes[mine].exchange(name, theirs)
    held = world.tasks.held_out(HELD_OUT // honest)
    right = [world.right(node.fast, held) for node in nodes]
    return {
        "arm": arm,
        "seed": seed,
        "rounds": rounds,
        "rate": rate,
        "pass_1": fmean(each for of in right for each in of),
        "pass_1_of_nodes": [fmean(of) for of in right],
        "loss": fmean(world.loss(node.fast, held[:256]) for node in nodes),
        "costs": _noise([node.costs for node in nodes]) if lie in NOBODY_LIES else None,
        "counts": dict(sum((node.counts for node in nodes), Counter())),
        "cpu_s": time.process_time() - began,
        "machine": machine(),
    }


def _noise(of_nodes: list[list[float]]) -> list[float]:
    """Mean and standard deviation of costs, and the correlation of each with the one before at the same node."""
    mean, spread = fmean(all_ := [cost for costs in of_nodes for cost in costs]), pstdev(all_)
    pairs = [(a - mean) * (b - mean) for costs in of_nodes for a, b in pairwise(costs)]
    return [mean, spread, fmean(pairs) / spread**2]


def path_of(arm: str, seed: int, rounds: int, rate: float) -> Path:
    return FOLDER / f"{arm.replace(' ', '-')}-{rounds}-{rate:g}-{seed}.json"


def report() -> str:
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    rows = []
    for rounds, rate in sorted({(f["rounds"], f["rate"]) for f in found}):
        of = {(f["arm"], f["seed"]): f for f in found if (f["rounds"], f["rate"]) == (rounds, rate)}
        for arm in ARMS:
            runs = {seed: f for (name, seed), f in of.items() if name == arm}
            if runs:
                rows.append([rounds, f"{rate:g}", arm, len(runs), *_cells(arm, runs, of)])
    columns = [
        "rounds",
        "rate",
        "liar",
        "seeds",
        "pass@1, %",
        "less than none, points",
        "loss",
        "applied, in part, gates, probe",
        "cost, spread, correlation",
    ]
    return table(columns, rows)


def _cells(arm: str, runs: dict[int, dict[str, Any]], of: dict[tuple[str, int], dict[str, Any]]) -> Iterable[str]:
    without = "none" + (TEN if arm.endswith(TEN) else "")
    base = {seed: of[without, seed] for seed in runs if (without, seed) in of}
    yield f"{100 * fmean(f['pass_1'] for f in runs.values()):.1f}"
    less = [100 * (base[seed]["pass_1"] - runs[seed]["pass_1"]) for seed in base]
    yield interval(less, "+.1f") if less and any(less) else ""
    yield f"{fmean(f['loss'] for f in runs.values()):.3f}"
    yield ", ".join(
        f"{fmean(f['counts'].get(n, 0) for f in runs.values()):.0f}" for n in ("applied", "in part", "gates", "probe")
    )
    noise = [costs for f in runs.values() if (costs := f.get("costs"))]
    yield ", ".join(f"{fmean(each):.3f}" for each in zip(*noise, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if not args.report:
        torch.set_num_threads(1)
        world = World()
        until = time.monotonic() + 60 * args.minutes
        for seed in args.seeds:
            for arm in args.arms:
                path = path_of(arm, seed, args.rounds, args.rate)
                if not path.exists() and time.monotonic() < until:
                    figures = run(world, arm, seed, args.rounds, args.rate)
                    write_row(path, figures)
                    print({key: value for key, value in figures.items() if key != "machine"}, flush=True)
    print(report())


if __name__ == "__main__":
    main()
