"""How soon a node that has nothing is where its cohort is: one that joins late, and one that lost everything.

    python -m benchmarks.late_join [--policies 0.44M 50M] [--repeats 3]

Real processes on this machine: a bootstrap and two nodes that train and average. A third joins with nothing. When it
has trained on, it is killed (SIGKILL), its run directory deleted, and the same command started again; and once more
with its identity kept. All have the same model, but weights after the start come from peers alone: there is no
checkpoint to go on from. The 50M policy has random weights (200 MB), and its rewards are chance.

Wall seconds from the start of the process, imports included, to the end of its first round, to when it has gone on
with a peer's weights, and to the end of the first update after that. Goal: trains on a peer's weights within 30 s.
CPU seconds, of all its processes, say how much of that is work and how much waiting for a machine that is busy.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import RESULTS, table, write
from benchmarks.overhead import LOCAL, commands, link_of, metrics, until
from benchmarks.processes import merged, mind_signals, other_load, tree

GOAL_S = 30.0
PERIOD_S = 10.0
PATIENCE_S = 180.0
WENT_ON = "going on with the weights of"
POLICIES = {"0.44M": 50, "50M": 2}
"""Policy -> `averaging.every`: a peer that far ahead is gone on from, so a round of the big one must not take ages."""
SETTINGS = """
tasks = ["small"]
[policy]
model = "{model}"
threads = 1
[rollouts]
group_size = 4
max_new_tokens = 8
[sharing]
own = {own}
foreign = 0
[eval]
questions = 0
[averaging]
method = "noloco"
every = {every}
"""
CHANCE = """
[rewards]
functions = [{{ path = "{functions}:chance" }}]
checker_weight = 0
"""
FUNCTIONS = '''
import random

def chance(completions, **columns):
    """Whatever it answers, every round has its update."""
    return [float(random.random() < 0.5) for completion in completions]
'''
STEPS = ("first round", "a peer's weights", "first update with them", "CPU s until a peer's weights")
Row = dict[str, Any]
Run = Callable[..., "subprocess.Popen[str]"]


def make_policy(name: str, folder: Path) -> str:
    """Path of a policy of that size."""
    if name == "0.44M":
        return "starter"
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from swarm_node.policy.model_path import starter_path
    from swarm_node.policy.policy import save

    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 12}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **size, **ids))
    save(model, tokenizer, folder / "policy")
    return str(folder / "policy")


def measure(name: str, repeats: int) -> Row:
    """Seconds of each step in each case, for the policy `name`."""
    every = POLICIES[name]
    with commands() as (folder, run):
        (folder / "rewards.py").write_text(FUNCTIONS)
        small = name == "0.44M"
        text = SETTINGS.format(model=make_policy(name, folder), every=every, own=4 if small else 1)
        if not small:
            text += CHANCE.format(functions=folder / "rewards.py")
        (folder / "settings.toml").write_text(text)
        new = ["new", "--name", "bench", "--tasks", "small", "--averaging-period-s", str(PERIOD_S)]
        new += ["--out", str(folder / "swarm.toml")]
        subprocess.run([sys.executable, "-m", "swarm_node", *new], check=True, capture_output=True)
        run("bootstrap", str(folder / "swarm.toml"), *LOCAL, "--run-dir", str(folder / "hub"))
        link = link_of(folder / "hub")

        def join(path: Path, pace_s: float = 0.0) -> subprocess.Popen[str]:
            settings = "--config", str(folder / "settings.toml"), "--set", f"pace_s={pace_s}"
            return run("join", link, "--name", path.name, *LOCAL, *settings, "--run-dir", str(path))

        for path in (folder / "a", folder / "b"):
            join(path, pace_s=0.2 if small else 12.0)  # leaves the machine to the one that is timed
        for path in (folder / "a", folder / "b"):
            until(lambda path=path: _trained(path, 2 * every), PATIENCE_S)  # type: ignore[misc]
        cases: dict[str, list[Row]] = {"joins late": [], "lost everything": [], "lost all but its identity": []}
        for i in range(repeats):
            path = folder / f"late{i}"
            for case, rows in cases.items():
                if case == "lost everything":
                    shutil.rmtree(path)
                elif case == "lost all but its identity":
                    key = (path / "identity.key").read_bytes()
                    shutil.rmtree(path)
                    path.mkdir()
                    (path / "identity.key").write_bytes(key)
                    (path / "identity.key").chmod(0o600)
                rows.append(_watched(lambda path=path: join(path), path))  # type: ignore[misc]
                print(f"{name}, {case}: {rows[-1]}", flush=True)
        return {"every": every, "cases": cases}


def _watched(start: Callable[[], subprocess.Popen[str]], path: Path) -> Row:
    """Start a node, note when it gets where, and kill it."""
    began = time.time()
    process = start()
    try:
        went_on = until(lambda: _event(path), PATIENCE_S)
        cpu_s = sum(sum(relative.cpu_times()[:2]) for relative in tree(process.pid))
        version = int(went_on["text"].rpartition(" ")[2])
        after = until(lambda: _after(path, went_on["time"], version), PATIENCE_S)
        times = [metrics(path)[0]["time"], went_on["time"], after["time"]]
    finally:
        kin = tree(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        for relative in kin:
            if relative.is_running():
                relative.wait(20)  # p2pd and gossip end with their node
    seconds = [round(at - began, 2) for at in times]
    return {"seconds": seconds, "cpu_s": round(cpu_s, 2), "version": version, "rounds": after["round"]}


def _event(path: Path) -> Row | None:
    file = path / "events.jsonl"
    text = file.read_text() if file.exists() else ""
    events = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return next((event for event in events if event["text"].startswith(WENT_ON)), None)


def _after(path: Path, time_: float, version: int) -> Row | None:
    """The first update made with the weights of version `version`."""
    return next(
        (
            line
            for line in metrics(path)
            if line["time"] > time_ and line["step"] > version and "perf/trained_tok_s" in line
        ),
        None,
    )


def _trained(path: Path, updates: int) -> bool:
    lines = metrics(path)
    return bool(lines) and lines[-1]["step"] >= updates


def lines(figures: Row) -> list[list[str]]:
    """The table."""
    return [
        [name, case, *(f"{median(values):.1f} (at most {max(values):.1f})" for values in zip(*columns, strict=True))]
        for name in POLICIES
        if name in figures
        for case, rows in figures[name]["figures"]["cases"].items()
        for columns in [[(*row["seconds"], row["cpu_s"]) for row in rows]]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    mind_signals()
    path = RESULTS / "late_join.json"
    for name in args.policies:
        load = other_load()
        print(f"{name}: {load}", flush=True)
        figures = {"other load": load, "goal_s": GOAL_S, "figures": measure(name, args.repeats)}
        write("late_join", merged(path, name, figures))
    print(table(["policy", "case", *STEPS], lines(json.loads(path.read_text()))))


if __name__ == "__main__":
    main()
