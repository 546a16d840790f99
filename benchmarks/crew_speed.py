"""How fast a crew is on one machine, and what its messages cost: what `crew` runs.

overhead   In one process, round by round in turn: the plain policy's node, and that of a crew of one stage with the
           whole machinery of a crew (`CrewNode`, `StageTransport`, `Driver`, `Worker`) on a network in memory. CPU and
           wall time of sampling (`Node.collect`) and of the update (`Node.learn`) apart; the same seeds.
processes  `swarm-node local` and crews of 1, 2 and 4 terminals over loopback. Per round: wall time, CPU time of the
           terminals (nodes) and of their network processes; the lead's own figures for the rest.

Every answer is rewarded by chance, so that each round has an update; the learning rate is so small that all draw the
same samples, but for what the wire rounds off.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.common import median
from benchmarks.late_join import FUNCTIONS
from benchmarks.overhead import LOCAL, commands, link_of, metrics, until
from benchmarks.processes import kind, tree

GROUPS, SAMPLES = 8, 8
RATE = 1e-7


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    tokens: int
    """Of a microbatch in `processes`: room for one group."""


MODELS = {"0.44M": Model(2, 128, 64), "5M": Model(8, 224, 320)}
"""The first is the starter, which answers in three tokens; the other has random weights and mostly goes on to the end.
"""
LENGTH = 32
USUAL = 8192
"""Tokens of a microbatch by default: one is enough for a round."""
ARMS: dict[str, tuple[int, str]] = {
    "local": (0, "float32"),
    "1": (1, "bfloat16"),
    "2": (2, "bfloat16"),
    "4": (4, "bfloat16"),
    "2, float32": (2, "float32"),
    "2, int8": (2, "int8"),
}
"""Stages (0 = the plain policy), and how activations travel between them."""
WARM = 3
"""Rounds before those that count."""
PARTS = {"sampling": (0, 1), "update": (1, 2), "round": (0, 3)}
"""Between which readings of the clocks."""
PATIENCE_S = 900.0
CONFIG = """
seed = {seed}
tasks = ["small"]
[policy]
model = "{model}"
dtype = "float32"
threads = 1
[rollouts]
groups = {groups}
group_size = {samples}
max_new_tokens = {length}
[grpo]
learning_rate = {rate}
microbatch_tokens = {tokens}
[sharing]
own = {groups}
foreign = 0
[rewards]
functions = [{{ path = "{functions}:chance" }}]
checker_weight = 0
[eval]
questions = 0
"""
Row = dict[str, Any]


def config_of(model: str, seed: int, folder: Path, tokens: int) -> Path:
    """Settings in `folder`, of all contestants. `tokens`: of a microbatch."""
    (folder / "rewards.py").write_text(FUNCTIONS)
    size = MODELS[model]
    file = folder / "settings.toml"
    file.write_text(
        CONFIG.format(
            seed=seed,
            model="starter" if size.layers == 2 else random_policy(size, folder / "policy"),
            groups=GROUPS,
            samples=SAMPLES,
            length=LENGTH,
            rate=RATE,
            tokens=tokens,
            functions=folder / "rewards.py",
        )
    )
    return file


def random_policy(size: Model, folder: Path) -> Path:
    """A starter that was taught nothing."""
    from transformers import AutoTokenizer

    from swarm_node.policy.model_path import starter_path
    from swarm_node.policy.policy import save
    from swarm_node.policy.starter import build_model

    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    save(build_model(len(tokenizer), size.layers, size.hidden, 0), tokenizer, folder)
    return folder


# --------------------------------------------------------------------- a crew of one, in this process


@contextmanager
def nodes(file: Path, folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    """The plain policy's node, that of a crew of one stage, and its CrewNode."""
    from swarm_node.config import load_config
    from swarm_node.node import Node, fitted
    from swarm_node.pipeline.assemble import CrewParts
    from swarm_node.pipeline.crew import CrewNode
    from swarm_node.policy.loading import load_policy
    from swarm_node.runtime.shutdown import Stopper
    from swarm_node.storage.rundir import RunDir
    from swarm_node.swarm.join import JoinedSwarm
    from swarm_node.tasks.taskset import load_tasks
    from swarm_protocol.identity import Identity
    from swarm_protocol.manifest import Manifest, ManifestTask
    from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock

    plain = load_config(file)
    tasks = load_tasks(plain.tasks, plain.rewards)
    quiet: Callable[..., None] = lambda *texts: None  # noqa: E731
    policy = load_policy(plain.policy, plain.rollouts, quiet)
    with ExitStack() as stack:
        manifest = Manifest(name="bench", tasks=[ManifestTask(env="small")])
        identity = Identity.load_or_create(folder / "identity.key")
        transport = MemoryNetwork(VirtualClock()).join(identity, manifest.swarm_id)
        run = stack.enter_context(RunDir.open(folder / "crew"))
        config = load_config(file, sets=["pipeline.stages=1", "pipeline.crew=bench"])
        crew = CrewNode(CrewParts(config, JoinedSwarm(manifest, identity, transport, tasks), run, quiet, stack), stack)
        with Stopper(last_resort=lambda: None) as stop:
            assert crew.follow(stop)
            crew.take_lead(stop)
        policies: list[tuple[Any, Any]] = [(policy, None), (crew.policy, crew.driver)]
        made = [
            Node(fitted(plain, one, quiet), one, load_tasks(plain.tasks, plain.rewards), quiet, optimizer=optimizer)
            for one, optimizer in policies
        ]
        yield made[0], made[1], crew


def overhead(model: str, seed: int, rounds: int) -> Row:
    """CPU and wall seconds of each round, by part, of [plain, crew of one]; tokens that each sampled. At the usual
    microbatches, and at those of `processes`, of which there are `microbatches` in an update."""
    torch.set_num_threads(1)
    sizes = {"usual": USUAL, "processes": MODELS[model].tokens}
    return {"model": model, "seed": seed, **{name: _in_turn(model, seed, rounds, n) for name, n in sizes.items()}}


def _in_turn(model: str, seed: int, rounds: int, tokens: int) -> Row:
    times: Row = {f"{part}_{clock}": [[], []] for part in PARTS for clock in ("cpu", "wall")}
    sampled: list[list[int]] = [[], []]
    microbatches: list[int] = []
    with tempfile.TemporaryDirectory() as name, nodes(config_of(model, seed, Path(name), tokens), Path(name)) as three:
        plain, staged, crew = three
        _note_plans(plain, microbatches)
        for number in range(WARM + rounds):
            for i in (0, 1) if number % 2 else (1, 0):
                node = (plain, staged)[i]
                clocks = [_clocks()]
                collected = node.collect()
                clocks.append(_clocks())
                node.learn(node.choose(collected))
                clocks.append(_clocks())
                if node is staged:
                    crew.round_over(node.round, 0.0, None)
                clocks.append(_clocks())
                if number < WARM:
                    continue
                sampled[i].append(collected.num_tokens)
                for part, (a, b) in PARTS.items():
                    for k, clock in enumerate(("cpu", "wall")):
                        times[f"{part}_{clock}"][i].append(clocks[b][k] - clocks[a][k])
        return {
            "parameters": plain.policy.num_parameters(),
            "times": times,
            "tokens": sampled,
            "microbatches": microbatches[WARM:],
        }


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _note_plans(node: Any, microbatches: list[int]) -> None:
    """Have the trainer note how many microbatches each update has."""
    plan = node.trainer.plan

    def noted(rows: Any) -> Any:
        planned = plan(rows)
        microbatches.append(len(planned))
        return planned

    node.trainer.plan = noted


# --------------------------------------------------------------------- processes


def processes(model: str, arm: str, seed: int, rounds: int) -> Row:
    """One contestant in processes of its own, after `WARM` rounds for `rounds` more."""
    stages, codec = ARMS[arm]
    with commands() as (folder, run):
        file = config_of(model, seed, folder, MODELS[model].tokens)
        common = ["--config", str(file)]
        started = []
        if not stages:
            started.append(run("local", *common, "--run-dir", str(folder / "t0"), "--rounds", "1000000"))
        else:
            _new_swarm(folder)
            run("bootstrap", str(folder / "swarm.toml"), *LOCAL, "--run-dir", str(folder / "hub"))
            link = link_of(folder / "hub")
            common += ["--stages", str(stages), "--crew", "bench", "--set", f"pipeline.wire={codec}", *LOCAL]
            for k in range(stages):
                started.append(run("join", link, "--name", f"t{k}", *common, "--run-dir", str(folder / f"t{k}")))

        def reached(number: int) -> list[Row] | None:
            time.sleep(0.5)  # reading takes time that the terminals need
            if any(process.poll() is not None for process in started):
                raise RuntimeError("a terminal ended")
            lines = [line for k in range(max(1, stages)) for line in metrics(folder / f"t{k}")]
            return lines if len(lines) >= number else None

        before = len(until(lambda: reached(WARM), PATIENCE_S))
        cpu = _cpu(started)
        lines = until(lambda: reached(before + rounds), PATIENCE_S)
        spent = {key: value - cpu[key] for key, value in _cpu(started).items()}
        done = len(lines) - before
        lines = lines[before:]
    columns = ("step_time", "perf/generated_tok_s", "perf/trained_tok_s", "stages/bubble", "stages/bytes_per_token")
    return {
        "model": model,
        "arm": arm,
        "seed": seed,
        "rounds": done,
        "seconds": [after["time"] - before["time"] for before, after in zip(lines, lines[1:], strict=False)],
        "cpu_s": {key: value / done for key, value in spent.items()},
        **{name: [line[name] for line in lines if name in line] for name in columns},
    }


def _new_swarm(folder: Path) -> None:
    new = ["new", "--name", "bench", "--tasks", "small", "--out", str(folder / "swarm.toml")]
    subprocess.run([sys.executable, "-m", "swarm_node", *new], check=True, capture_output=True)


def _cpu(started: list[Any]) -> dict[str, float]:
    """CPU seconds of all processes so far: `node`, and what the network takes (`p2pd`, `gossip`)."""
    totals = {"node": 0.0, "p2pd": 0.0, "gossip": 0.0}
    for process in started:
        for relative in tree(process.pid):
            totals[kind(relative)] += sum(relative.cpu_times()[:2])
    return totals


# --------------------------------------------------------------------- figures of runs


def ratio(times: list[list[float]], tokens: list[list[int]]) -> float:
    """Of [plain, crew]: time for a token of the crew over that of the plain policy, median of all rounds."""
    plain, staged = ([t / max(1, n) for t, n in zip(*pair, strict=True)] for pair in zip(times, tokens, strict=True))
    return median([b / a for a, b in zip(plain, staged, strict=True)])


def bubble_fraction(stages: int, microbatches: int) -> float:
    """Share of time that a stage waits, for K equally fast stages and M microbatches: (K - 1) / (M + K - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def theory(stages: int, microbatches: list[int]) -> float:
    """Share of its time that a stage waits by the schedule, mean over updates."""
    return fmean(bubble_fraction(stages, m) for m in microbatches)
