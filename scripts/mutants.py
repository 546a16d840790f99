"""How many small faults, put into the code at random, do the tests find?

    python scripts/mutants.py             # all parts: an hour and more of CPU time on one core
    python scripts/mutants.py --part grpo --tests tests/swarm_node/grpo --count 10 --jobs 1

Everything happens in copies of the repository in a temporary directory. First the tests run once under coverage, which
tells which test reaches which line. Then each mutant gets a process of its own, which runs the tests that reach its
line, the cheapest first, until one fails. The processes come from a fork server that has imported torch already.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import msgspec
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.mutations import Mutant, mutants  # noqa: E402

PARTS = {
    "protocol": ["protocol/swarm_protocol"],
    "admission": ["swarm_node/sharing"],
    "grpo": ["swarm_node/grpo"],
    "averaging": ["swarm_node/averaging"],
    "recovery": ["swarm_node/pipeline/recovery", "swarm_node/storage"],
}
"""Part -> its directories and files."""
SEED = 2026
COUNT = 40
"""Mutants drawn in each part."""
GOAL = 0.85
"""The share of the mutants, equivalent ones aside, that the tests must find."""
EQUIVALENT = "scripts/mutants_equivalent.toml"
RESULTS = "benchmarks/results/mutants.json"
KILLED = ("killed", "hung")
HANG_S = 120
"""Added to ten times what the tests took without a fault: a busy machine is slow, a mutant may run for ever."""
FIRST_TESTS = 40
"""A mutant meets so many tests first. Most die there, and the files of the other tests need not be imported."""
PYTEST_ENDED = 100
"""Added to pytest's exit status, which differs then from that of a process in which Python itself failed."""
_ages = itertools.count(10**9)
"""Times of changed files: no two are equal, and archives can hold them (after 1980)."""
PRELOAD = ["pytest", "torch", "transformers", "peft", "hivemind", "numpy"]
ALREADY = "ignore::pytest.PytestAssertRewriteWarning"  # a plugin of pytest was imported by the fork server
PYTEST = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--no-header", "-W", ALREADY]
COVERAGE = """[run]
parallel = true
patch = _exit
sigterm = true
context = ${MUTANTS_TEST-}
"""


@dataclass
class Result:
    part: str
    mutant: str
    """File, function, line of code and change."""
    outcome: str
    """killed, hung (counted as killed), survived, unreached or equivalent."""
    by: str
    """The test that failed."""
    tests: int
    """Tests that reach the line."""
    seconds: float


def draw(root: Path, directories: list[str], count: int, seed: int) -> list[Mutant]:
    """The mutants of a part, at most one for each line of a function."""
    files = sorted(file for directory in directories for file in _python_files(root / directory))
    every = [mutant for file in files for mutant in mutants(str(file.relative_to(root)), file.read_bytes())]
    drawn: dict[tuple[str, str, str], Mutant] = {}
    for mutant in sorted(every, key=lambda mutant: mutant.rank(seed)):
        drawn.setdefault((mutant.file, mutant.function, mutant.line), mutant)
    return list(drawn.values())[:count]


def _python_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def copy_repository(root: Path, target: Path) -> None:
    """What git knows or would know: no environments, caches or runs."""
    names = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=root, text=True)
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


@dataclass
class Reach:
    """Which tests reach which line, and what each costs."""

    seconds: dict[str, float]
    """Test -> wall time. Tests that fail without a fault are missing."""
    lines: dict[str, dict[int, list[str]]]
    """File -> line -> tests."""

    def tests(self, mutant: Mutant) -> list[str]:
        """Cheap files first, in each of them cheap tests first: files hold fixtures that their tests share."""
        first, last = mutant.statement
        lines = self.lines.get(mutant.file, {})
        reached = {test for line in range(first, last + 1) for test in lines.get(line, []) if test in self.seconds}
        files = defaultdict(list)
        for test in sorted(reached, key=self.cost):
            files[test.split("::")[0]].append(test)
        mean = {file: sum(map(self.cost, tests)) / len(tests) for file, tests in files.items()}
        return [test for file in sorted(files, key=mean.__getitem__) for test in files[file]]

    def cost(self, test: str) -> float:
        return self.seconds[test]


def map_reach(copied: Path, work: Path, directories: list[str], tests: list[str], jobs: int) -> Reach:
    """Run the tests once under coverage."""
    import coverage

    sources = "".join(f"\n    {copied / name}{'' if name.endswith('.py') else '/*'}" for name in directories)
    settings = work / "coverage.ini"
    settings.write_text(f"{COVERAGE}data_file = {work / 'parts' / 'coverage'}\ninclude = {sources}\n")
    (work / "parts").mkdir()
    times = work / "times.jsonl"
    measured = os.environ | {"COVERAGE_PROCESS_START": str(settings), "MUTANTS_TIMES": str(times)}
    options = ["-p", "scripts.mutants_reach", "-p", "no:cacheprovider", "-q", "--no-header", "-rfE"]
    parallel = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    measured["PYTHONPATH"] = f"{copied}{os.pathsep}{copied / 'protocol'}"
    subprocess.run([sys.executable, "-m", "pytest", *options, *parallel, *tests], cwd=copied, env=measured)
    combined = coverage.Coverage(data_file=str(work / "coverage"), config_file=False)
    combined.combine([str(work / "parts")])
    data = combined.get_data()
    rows = [json.loads(line) for line in times.read_text().splitlines()]
    return Reach(
        {row["test"]: row["seconds"] for row in rows if row["passed"]},
        {str(Path(file).relative_to(copied)): data.contexts_by_lineno(file) for file in data.measured_files()},
    )


def _run_pytest(copied: str, log: str, tests: list[str]) -> None:
    """In a process of the fork server."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copied)
    imported = {"swarm_node", "swarm_protocol"} & set(sys.modules)
    assert not imported, "the fork server must not import what mutants change"
    found, ours = [copied, f"{copied}/protocol"], [str(ROOT), str(ROOT / "protocol"), str(ROOT / "scripts")]
    sys.path[:] = [*found, *(path for path in sys.path if path not in ours)]
    os.environ["PYTHONPATH"] = os.pathsep.join(found)
    sys.exit(PYTEST_ENDED + pytest.main([*PYTEST, "-x", *tests]))


def run_tests(copied: Path, log: Path, tests: list[str], limit_s: float) -> str:
    """'passed', 'hung' or the test that failed. RuntimeError when pytest could not run the tests."""
    process = multiprocessing.get_context("forkserver").Process(target=_run_pytest, args=(str(copied), str(log), tests))
    process.start()
    process.join(limit_s)
    hung = process.exitcode is None
    _end(process.pid)
    process.join()
    if hung:
        return "hung"
    said = log.read_text(errors="replace") if log.exists() else ""
    match process.exitcode - PYTEST_ENDED:
        case pytest.ExitCode.OK:
            return "passed"
        case pytest.ExitCode.TESTS_FAILED | pytest.ExitCode.INTERRUPTED:  # interrupted: a file that cannot be imported
            return next(line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))).split(" ")[1]
    if process.exitcode < 0:
        return f"signal {-process.exitcode}"
    if "PytestUnraisableExceptionWarning" in said:  # it ends the run of all tests as well
        return "what a test left open"
    raise RuntimeError(f"the tests did not run (exit status {process.exitcode}):\n{said[-3000:]}")


def _end(pid: int) -> None:
    """A process of tests, and what it started and left behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def try_mutant(mutant: Mutant, reach: Reach, copied: Path, log: Path) -> tuple[str, str, int]:
    """(outcome, the test that failed, tests that reach the line)."""
    tests = reach.tests(mutant)
    file = copied / mutant.file
    source = file.read_bytes()
    try:
        _write(file, mutant.applied(source))
        for some in filter(None, (tests[:FIRST_TESTS], tests[FIRST_TESTS:])):
            said = run_tests(copied, log, some, HANG_S + 10 * sum(map(reach.seconds.__getitem__, some)))
            if said != "passed":
                return ("hung", "", len(tests)) if said == "hung" else ("killed", said, len(tests))
    finally:
        _write(file, source)
    return ("survived" if tests else "unreached"), "", len(tests)


def _write(file: Path, source: bytes) -> None:
    """Python recognises compiled code as current by the time and size of its source: each version has its own time."""
    file.write_bytes(source)
    age = next(_ages)
    os.utime(file, (age, age))


def try_all(
    parts: dict[str, list[Mutant]], reach: Reach, copies: list[Path], known: set[tuple[str, str, str]]
) -> Iterator[Result]:
    """Yield a result for each mutant, as many at a time as there are copies."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copied in copies:
        free.put(copied)

    def work(part: str, mutant: Mutant) -> Result:
        began = time.monotonic()
        outcome, by, tests = "equivalent", "", 0
        if mutant.key not in known:
            copied = free.get()
            try:
                outcome, by, tests = try_mutant(mutant, reach, copied, copied.with_suffix(".log"))
            finally:
                free.put(copied)
        took = round(time.monotonic() - began, 1)
        return Result(part, mutant.id, outcome, by, tests, took)

    with ThreadPoolExecutor(len(copies)) as pool:
        waiting = [pool.submit(work, part, mutant) for part, drawn in parts.items() for mutant in drawn]
        try:
            yield from (future.result() for future in waiting)
        finally:
            pool.shutdown(cancel_futures=True)


def equivalents(file: Path) -> set[tuple[str, str, str]]:
    """(function, line, change) of the mutants that no test can tell from the code."""
    rows = tomllib.loads(file.read_text()).get("mutant", []) if file.exists() else []
    return {(row["function"], row["line"], row["change"]) for row in rows}


def saved(file: Path) -> list[Result]:
    return [Result(**row) for row in json.loads(file.read_text())["mutants"]] if file.exists() else []


def table(results: list[Result]) -> str:
    """A row for each part, and the share that was killed of all that are not equivalent."""
    lines = [f"{'part':<10} drawn killed survived unreached equivalent"]
    rows = {part: [row for row in results if row.part == part] for part in dict.fromkeys(row.part for row in results)}
    for name, some in [*rows.items(), ("all", results)]:
        said = Counter(row.outcome for row in some)
        killed = said["killed"] + said["hung"]
        lines.append(
            f"{name:<10} {len(some):5} {killed:6} {said['survived']:8} {said['unreached']:9} {said['equivalent']:10}"
        )
    return "\n".join([*lines, f"killed: {share(results):.1%}"])


def share(results: list[Result]) -> float:
    counted = [row for row in results if row.outcome != "equivalent"]
    return sum(row.outcome in KILLED for row in counted) / max(1, len(counted))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (may be repeated)")
    parser.add_argument("--count", type=int, default=COUNT, help="mutants for each part")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at the same time")
    parser.add_argument("--tests", nargs="*", default=[], help="only these tests instead of all of `make test`")
    parser.add_argument("--out", type=Path, default=ROOT / RESULTS, help=f"default: {RESULTS}")
    parser.add_argument("--map", type=Path, help="a file that keeps which tests reach which line, for the next time")
    parser.add_argument("--again", action="store_true", help="only mutants that --out does not call killed")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; --again continues"))  # after the mutants that are tried
    parts = {part: draw(ROOT, PARTS[part], chosen.count, chosen.seed) for part in chosen.part or PARTS}
    found = [row for row in saved(chosen.out) if row.part not in parts or (chosen.again and row.outcome in KILLED)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        found = check(parts, found, Path(name), chosen)
    print(*(f"{row.outcome}: {row.mutant}" for row in found if row.outcome in ("survived", "unreached")), sep="\n")
    print(table(found))
    return 0 if share(found) >= GOAL else 1


def check(parts: dict[str, list[Mutant]], found: list[Result], work: Path, chosen: argparse.Namespace) -> list[Result]:
    """Try the mutants that are not among the results found before, and save the results after each."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before the fork server imports torch
    copies = [work / f"copy{number}" for number in range(chosen.jobs)]
    for copied in copies:
        copy_repository(ROOT, copied)
    if chosen.map and chosen.map.exists():
        reach = msgspec.json.decode(chosen.map.read_bytes(), type=Reach)
    else:
        reach = map_reach(copies[0], work, [name for part in parts for name in PARTS[part]], chosen.tests, chosen.jobs)
        if chosen.map:
            chosen.map.write_bytes(msgspec.json.encode(reach))
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    said = run_tests(copies[0], work / "control.log", sorted(reach.seconds, key=reach.cost)[:FIRST_TESTS], HANG_S)
    if said != "passed":
        raise RuntimeError(f"without a fault, {said} fails in a process of the fork server")
    before = {row.mutant for row in found}
    tried = {part: [mutant for mutant in drawn if mutant.id not in before] for part, drawn in parts.items()}
    for result in try_all(tried, reach, copies, equivalents(ROOT / EQUIVALENT)):
        print(f"{result.outcome:10} {result.seconds:6.1f} s {result.mutant}", flush=True)
        found = sorted([*found, result], key=lambda row: (list(PARTS).index(row.part), row.mutant))
        report = {"seed": chosen.seed, "killed": round(share(found), 3), "mutants": [asdict(row) for row in found]}
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
