"""The mutation check: what it changes, what it draws, and how it tells a test that looks from one that does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutants import Result, draw, share, table
from scripts.mutations import mutants

PACKAGE = """
LIMIT = 3

def small(value):
    return value < LIMIT

def unseen(value):
    return value

def idle(value):
    value.sort()
    return True

def elsewhere():
    print("here")
"""
TESTS = """
import subprocess, sys
from toy import idle, small

def test_small_is_below_the_limit():
    assert small(2) and not small(3)

def test_idle_is_called():
    idle([2, 1])

def test_another_process_prints():
    program = "import os, sys, toy; toy.elsewhere(); sys.stdout.flush(); os._exit(0)"
    assert subprocess.check_output([sys.executable, "-c", program])
"""
SCRIPT = """
import sys
from pathlib import Path
from scripts import mutants

mutants.ROOT, mutants.PARTS, mutants.PRELOAD = Path(sys.argv[1]), {"toy": ["toy.py"]}, ["pytest"]
sys.exit(mutants.main(["--jobs", "1", "--out", "out.json"]))
"""


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("return a < 2", ["return a < 2 -> return None", "a < 2 -> (a <= 2)", "2 -> 3"]),
        ("a -= b + 1", ["a -= b + 1 -> a += b + 1", "b + 1 -> (b - 1)", "1 -> 2"]),
        ("if not a and b: c()", ["not a and b -> (not (not a and b))", "not a and b -> (not a or b)", "not a -> (a)"]),
        ("await a.save(flag=True)", ["await a.save(flag=True) -> pass", "True -> False"]),
        ("raise ValueError(1 + 2)", ["raise ValueError(1 + 2) -> pass"]),
        ("logger.info(a + 1)", []),
        ("a: list[1] = f'{b + 1}'", []),
        ("assert a < 2", []),
    ],
)
def test_changes_of_a_statement(code: str, changes: list[str]) -> None:
    found = [mutant.change for mutant in mutants("toy.py", f"async def f(a=1):\n    {code}\n".encode())]
    assert [change for change in found if change != "c() -> pass"] == changes


def test_only_called_code_is_changed() -> None:
    source = b"A = 1 + 2\n@d(1)\ndef f(a=1, b: int = 2) -> g[3]:\n    'text'\nclass C:\n    x = 1\n"
    assert not mutants("toy.py", source)


def test_a_change_keeps_the_rest_of_the_file() -> None:
    source = "def f(a):\n    'é'; return ('é', a <  1)  # what\n".encode()
    changed = [mutant.applied(source).decode() for mutant in mutants("toy.py", source)]
    assert "def f(a):\n    'é'; return ('é', (a <= 1))  # what\n" in changed


def test_the_draw_survives_other_changes(tmp_path: Path) -> None:
    """Moved files and moved lines keep their mutants, and no line gives two."""
    functions = [f"def f{i}(a):\n    return a < {i} and a + {i}\n" for i in range(20)]
    (tmp_path / "old.py").write_text("\n".join(functions))
    (tmp_path / "new.py").write_text("import os\n\n" + "\n".join(reversed(functions)))
    old, new = (draw(tmp_path, [name], 8, seed=1) for name in ("old.py", "new.py"))
    assert [mutant.key for mutant in old] == [mutant.key for mutant in new]
    assert len({mutant.line for mutant in old}) == 8
    assert [mutant.key for mutant in draw(tmp_path, ["old.py"], 8, seed=2)] != [mutant.key for mutant in old]


def test_the_share_leaves_equivalent_mutants_out() -> None:
    results = [Result("a", "m", outcome, "", 1, 0.0) for outcome in ("killed", "hung", "equivalent", "survived")]
    assert share(results) == 2 / 3
    assert table(results).splitlines()[1].split() == ["a", "4", "2", "1", "0", "1"]


def test_the_script_finds_what_no_test_checks(root: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(PACKAGE)
    (tmp_path / "test_toy.py").write_text(TESTS)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/mutants_reach.py").write_bytes((root / "scripts/mutants_reach.py").read_bytes())
    listed = '[[mutant]]\nfunction = "idle"\nline = "value.sort()"\nchange = "value.sort() -> pass"\nreason = "a toy"\n'
    (tmp_path / "scripts/mutants_equivalent.toml").write_text(listed)
    subprocess.run(["git", "init", "-q"], check=True)
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr  # below the goal
    rows = json.loads((tmp_path / "out.json").read_text())["mutants"]
    outcomes = {row["mutant"].split("  ")[1]: row["outcome"] for row in rows}
    expected = {
        "return value < LIMIT": "killed",
        "return value": "unreached",
        "return True": "survived",
        "value.sort()": "equivalent",
        'print("here")': "killed",
    }
    assert outcomes == expected, ran.stdout
