"""Crews of real processes on this machine: a policy in stages learns, whoever of them dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import load_config
from tests.support.processes import QUICK, NodeProcess, Start, alive, make_manifest
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
SETS = (*QUICK, "pipeline.spare_wait_s=1", "pace_s=0.2", "policy.threads=1")
INVITATION = re.compile(r"swarm-node join '(swarm://\S+)' --stages (\d) --crew home")


def link_of(node: NodeProcess) -> str:
    """As it tells people to type it elsewhere."""
    return node.until(lambda: (found := INVITATION.search(node.output)) and found[1])


def times(node: NodeProcess, text: str) -> int:
    return len(re.findall(text, node.output))


class Crew:
    """Starts the members of a crew."""

    def __init__(self, start: Start, folder: Path, stages: int, rounds: int, *sets: str) -> None:
        self.start = start
        self.folder = folder
        self.manifest = make_manifest(folder)
        self.options = "--stages", str(stages), "--crew", "home", "--rounds", str(rounds)
        self.sets = (*SETS, *sets)

    def join(self, name: str, swarm: str = "", *options: str) -> NodeProcess:
        arguments = "join", swarm or str(self.manifest), "--name", name, *self.options, *options
        return self.start(*arguments, run_dir=self.folder / name, sets=self.sets)


def test_a_crew_goes_on_without_a_lost_peer(start: Start, tmp_path: Path) -> None:
    crew = Crew(start, tmp_path, 2, 100_000, "pace_s=1")
    a = crew.join("a")
    b = crew.join("b", link_of(a))
    a.until(lambda: a.last("stages/bytes_per_token") > 0)
    b.stop(signal.SIGKILL)
    a.until_says(r"stage 1 of crew home is lost \((b|peer …\w+): ")
    a.until_says(r"stage 1 (rebuilt|begins)")  # from the replica, if there was time for one
    a.until_says(r"stage 1 is back after \d+\.\d s, held by this node")
    a.until_rounds(2)
    assert times(a, "stage 1 of crew home is lost") == 1 and "Traceback" not in a.output


@pytest.mark.long
def test_a_peer_with_another_model_is_left_out(start: Start, tmp_path: Path) -> None:
    crew = Crew(start, tmp_path, 2, 60)
    a = crew.join("a")
    link = link_of(a)
    assert "crew home waits for 1 more peer" in a.output
    other = crew.join("other", link, "--lora")
    a.until_says("of crew home has other LoRA settings: it and this node cannot hold one policy")
    b = crew.join("b", link)
    assert a.ended() == 0, a.output
    assert b.ended() == 0, b.output
    assert [line["round"] for line in a.metrics] == list(range(1, 61))
    assert a.last("stages/recovered/base") == 2 and a.last("stages/lost") == 0
    assert a.last("stages/bytes_per_token") > 0 and not b.metrics
    assert "the run of crew home is over after round 60" in b.output
    for line in ("cannot hold one policy", "crew home is whole", "in another terminal"):
        assert times(a, line) == 1, a.output
    assert " lost" not in a.output + b.output
    assert other.process.poll() is None and "crew home is whole" not in other.output
    assert not (tmp_path / "a").stat().st_mode & 0o077  # the crew's name is its password, and stands in there


@pytest.mark.long
def test_either_terminal_may_be_killed(start: Start, tmp_path: Path) -> None:
    crew = Crew(start, tmp_path, 2, 100_000)
    a = crew.join("a")
    link = link_of(a)
    b = crew.join("b", link)
    a.until_rounds(12)

    b.stop(signal.SIGKILL)
    a.until_rounds(12)
    a.until_says(r"stage 1 of crew home is lost \((b|peer …\w+): ")
    a.until_says(r"stage 1 rebuilt from the replica that this node kept; (nothing is lost|lost: its last update)")
    a.until_says(r"stage 1 is back after \d+\.\d s, held by this node")
    a.until_says(r"reward \d\.\d+ (in the \d+ rounds )?before stage 1 was lost, \d\.\d+ in the 10 after")
    b = crew.join("b", link)
    a.until_says(r"stage 1 passed to (b|peer …)")
    a.until_rounds(12)
    assert times(a, "stage 1 of crew home is lost") == 1 and a.last("stages/recovered/live") == 1
    assert a.last("stages/bytes_per_token") > 0

    a.stop(signal.SIGKILL)
    rounds = a.rounds
    b.until(lambda: b.rounds > rounds)
    assert b.metrics[0]["round"] in range(rounds, rounds + 3)
    assert times(b, r"the leader of crew home is lost \((a|peer …\w+): ") == 1
    b.until_says(r"stage 0 rebuilt from the replica that this node kept; (nothing is lost|lost: its last update)")
    b.until_says(r"reward \d\.\d+ (in the \d+ rounds )?before the leader of crew home was lost, \d\.\d+ in the 10")
    c = crew.join("c", link_of(b))
    b.until_says(r"stage 1 passed to (c|peer …)")
    b.until_rounds(5)

    for node in (b, c):
        node.process.send_signal(signal.SIGINT)
    assert [node.ended() for node in (b, c)] == [0, 0], b.output + c.output
    rounds = b.rounds
    again = [crew.join("c", link_of(b)), crew.join("b")]
    # c leads if b could still have it keep the first stage
    lead = again[0].until(lambda: next((one for one in again if one.rounds >= rounds + 3), None))
    if lead is again[1]:
        assert int(lead.until_says(r"resumed \S+ at round (\d+)")[1]) == rounds
    assert [line["round"] for line in lead.metrics[-2:]] == [lead.rounds - 1, lead.rounds]
    assert times(lead, r"stage \d rebuilt from the checkpoint after update \d+; nothing is lost") == 2, lead.output


@pytest.mark.long
def test_a_lead_that_waits_can_be_stopped(start: Start, tmp_path: Path) -> None:
    crew = Crew(
        start, tmp_path, 2, 100_000, "pipeline.replica=off", "pipeline.spare_wait_s=600", "checkpoints.every=1000"
    )
    a = crew.join("a")
    link = link_of(a)
    b = crew.join("b", link, "--set", "pipeline.wire=int8", "--set", "grpo.weight_decay=0.5")
    a.until_rounds(5)
    changed = r'pipeline.wire = "bfloat16" \(here "int8"\), grpo.weight_decay = 0.0'
    b.until_says(rf"crew home goes by its leader's options: {changed}")
    assert load_config(tmp_path / "b" / "config.toml").pipeline.wire == "int8"  # as its user wants it
    b.stop(signal.SIGKILL)
    a.until_says(r"stage 1 of crew home is lost")
    rounds = a.rounds
    assert not list((tmp_path / "a" / "stages").glob("*/round-*"))
    assert a.stop(signal.SIGINT) == 0, a.output
    (kept,) = (tmp_path / "a" / "stages" / "0").glob("round-*")
    assert int(kept.name.split("-")[1]) >= a.last("step") - 1 > 0
    assert "stopping after round" in a.output and "Traceback" not in a.output
    a = crew.join("a")
    b = crew.join("b", link_of(a))
    assert int(a.until_says(r"resumed \S+ at round (\d+)")[1]) in (rounds, rounds + 1)
    a.until_says(r"stage 0 rebuilt from the checkpoint after update \d+; nothing is lost")
    a.until_rounds(2)


@pytest.mark.long
def test_terminals_stopped_in_turn_lose_nothing(start: Start, tmp_path: Path) -> None:
    crew = Crew(start, tmp_path, 2, 100_000, "pipeline.replica=off", "checkpoints.every=1000")
    a = crew.join("a")
    link = link_of(a)
    b = crew.join("b", link)
    a.until(lambda: a.last("step") >= 3)

    assert b.stop(signal.SIGTERM) == 0, b.output
    b.until_says("a keeps stage 1 for the node that holds it next")
    a.until_says("stage 1 rebuilt from the replica that this node kept; nothing is lost")
    c = crew.join("c", link)
    a.until_says(r"stage 1 passed to (c|peer …)")
    a.until_rounds(2)
    assert steps(a) == sorted(steps(a))

    assert a.stop(signal.SIGINT) == 0, a.output
    a.until_says(r"(c|peer …\w+) keeps stage 0 for the node that holds it next")
    export = a.until_says(r"the weights of all stages are here: `swarm-node export (\S+) DIR` makes a model of them")
    c.until_says("stage 0 rebuilt from the replica that this node kept; nothing is lost")
    c.until_rounds(1)
    assert 0 <= steps(c)[0] - a.last("step") <= 4  # a round makes up to four updates, once a's groups came by gossip
    done = CliRunner().invoke(app, ["export", export[1], str(tmp_path / "model")])
    assert done.exit_code == 0 and "all 2 stages after update" in done.output, done.output


def steps(node: NodeProcess) -> list[float]:
    """Updates after each round that it led."""
    return [line["step"] for line in node.metrics]


@pytest.mark.long
def test_a_middle_stage_is_rebuilt_of_its_neighbours(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "model"
    command = [sys.executable, "-m", "swarm_node", "starter", "--out", str(model), "--layers", "4", "--steps", "5"]
    subprocess.run([*command, "--hidden", "64"], check=True, capture_output=True)
    reward = tmp_path / "reward.py"  # the model cannot do anything yet
    reward.write_text("def length(prompts, completions, **columns):\n    return [len(c) / 16 for c in completions]\n")
    function = f'rewards.functions=[{{path="{reward}:length"}}]'
    crew = Crew(start, tmp_path, 4, 100_000, "pipeline.replica=off", f"policy.model={model}", function)
    first = crew.join("n0")
    link = link_of(first)
    others = {name: crew.join(name, link) for name in ("n1", "n2", "n3")}
    first.until(lambda: first.last("step") >= 3)
    first.until_says("crew home is whole")
    holders = {name: re.search(r"stage (\d) of 4", node.output) for name, node in others.items()}
    victim = next(name for name, found in holders.items() if found and found[1] == "2")
    others.pop(victim).stop(signal.SIGKILL)
    first.until(lambda: first.last("stages/recovered/mean") == 1)
    first.until_says(r"stage 2 rebuilt as the mean of stages 1 and 3, weighted with their gradient norms \(CheckFree\)")
    first.until_rounds(5)
    assert all(node.process.poll() is None for node in (first, *others.values()))


@pytest.mark.long
def test_a_crew_of_processes_of_one_machine(start: Start, tmp_path: Path) -> None:
    quick = tuple(each for each in SETS if not each.startswith("network"))
    lead = start("local", "--stages", "2", "--rounds", "100000", run_dir=tmp_path / "run", sets=quick)
    lead.until_rounds(3)

    def other() -> int | None:
        found = [pid for command, pid in lead.children().items() if "swarm_node.cli.stage_process" in command]
        return found[0] if found else None

    child = other()
    assert child is not None
    os.kill(child, signal.SIGKILL)
    lead.until(lambda: (pid := other()) is not None and pid != child)
    lead.until_says(r"the process of stage 1 ended with -9 \(see \S+1\.log\); it is started again")
    lead.until_says(r"stage 1 passed to (stage-1|peer …)")
    lead.until_rounds(3)
    child = other()
    assert child is not None
    lead.stop(signal.SIGKILL)
    until(lambda: not alive(child))


@pytest.mark.long
def test_stages_of_one_machine_change_no_reward(start: Start, tmp_path: Path) -> None:
    quick = tuple(each for each in SETS if not each.startswith(("network", "pace_s")))
    rewards = []
    for stages in ("0", "2"):
        run = start(
            "local",
            *("--stages", stages, "--rounds", "5"),
            run_dir=tmp_path / stages,
            sets=(*quick, "seed=3", "rollouts.groups=8", "pipeline.wire=float32"),
        )
        assert run.ended() == 0, run.output
        rewards.append([{k: v for k, v in line.items() if k.startswith("reward")} for line in run.metrics])
    assert len(rewards[0]) == 5 and rewards[0] == rewards[1]
