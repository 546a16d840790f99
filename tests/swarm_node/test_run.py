"""Signals at the two ends of a run, in real processes: while it is being loaded, and after its last round."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys, time
from pathlib import Path
from swarm_node import run
from swarm_node.config import NodeConfig
from swarm_node.recovery.mirror import Mirror
from swarm_node.recovery.snapshots import SnapshotStore

def hangs(word):
    def hang(*arguments, **options):
        print(word, flush=True)
        for _ in range(600): time.sleep(0.1)
        print("never", flush=True)
    return hang

def told(what, word):
    def tell(*arguments):
        print(word, flush=True)
        return what(*arguments)
    return tell

SnapshotStore.close = told(SnapshotStore.close, "closed")
run.Report = told(run.Report, "reported")
config = {
    "run_dir": sys.argv[1],
    "rounds": 1,
    "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
    "eval": {"questions": 0},
    "snapshots": {"to": f"file://{sys.argv[1]}-away"},
}
os.mkdir(f"{sys.argv[1]}-away")
PATCH
sys.exit(run.run_local(NodeConfig.model_validate(config)))
"""


def stopped_at(patch: str, word: str, run: Path) -> tuple[str, int]:
    """What a run says from `word` on, where it is told to stop, and its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("PATCH", patch), str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    before = []
    while (line := process.stdout.readline()) and line.strip() != word:
        before.append(line)
    assert line, "".join(before)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    return out, process.returncode


@pytest.mark.timeout(240)
def test_a_signal_ends_the_last_copy_well(tmp_path: Path) -> None:
    out, code = stopped_at('Mirror._copy = hangs("copying")', "copying", tmp_path / "run")
    assert code == 0, out
    assert "never" not in out and "the last snapshot is not at file://" in out
    assert out.index("closed\n") < out.index("reported\n"), "what people see comes after goodbye"
    assert any((tmp_path / "run/snapshots").glob("round-00000001/SHA256SUMS"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["load_policy", "load_tasks"])
def test_a_signal_before_training_is_one_sentence(tmp_path: Path, what: str) -> None:
    out, code = stopped_at(f'run.{what} = hangs("loading")', "loading", tmp_path / "run")
    assert code == 0, out
    assert "stopping before training began; the same command begins here again" in out
    assert "never" not in out and "Traceback" not in out
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert left <= {"lock", "events.jsonl"}


SCORES_SLOWLY = """
import sys as s
module = s.modules["swarm_node.rollouts.collect"]
judge, judged = module._judge, []

def slowly(*arguments):
    judged.append(judge(*arguments))
    if len(judged) == 2: hangs("scoring")()

module._judge = slowly
run.Node.share = lambda node, collected: print("shared", len(collected.groups), flush=True)
"""


@pytest.mark.timeout(240)
def test_a_stopped_round_shares_what_is_finished(tmp_path: Path) -> None:
    out, code = stopped_at(SCORES_SLOWLY, "scoring", tmp_path / "run")
    assert code == 0, out
    assert "shared 1\n" in out


@pytest.mark.timeout(240)
def test_slow_rounds_are_saved_by_the_clock(tmp_path: Path) -> None:
    patch = 'config |= {"rounds": 3, "snapshots": {"every": 1000, "every_minutes": 1e-9}}'
    program = [sys.executable, "-c", PROGRAM.replace("PATCH", patch), str(tmp_path / "run")]
    subprocess.run(program, check=True, timeout=120, capture_output=True)
    names = sorted(path.name for path in (tmp_path / "run/snapshots").glob("round-*"))
    assert len(names) == 2 and names[-1] == "round-00000003", "the last is there anyway; nobody waits for a slow disk"
