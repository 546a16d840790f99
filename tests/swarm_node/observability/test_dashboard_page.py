"""What the dashboard's page shows, in a real browser, against the files that it shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from swarm_node.observability.dashboard import view
from swarm_node.storage.rundir import RunDir
from tests.support.chromium import Chromium
from tests.support.dashboards import served
from tests.support.run_files import answered, metrics, write

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=document.title='owned'>"
ROUNDS = 40
SINCE = f"since {datetime.fromtimestamp(1000.0):%Y-%m-%d %H:%M}"  # start of the run, in local time
ENDED = f"{datetime.fromtimestamp(1040.0):%Y-%m-%d %H:%M}"  # the last round
HELD_OUT = "'[aria-label=\"Held-out questions of alice\"] thead'"
LONGEST_PHONE_PX = 5000  # seven screens of a phone to the end of the page: peers, settings and the like are folded
READY = "document.querySelector('[data-figure=rounds]')?.textContent.length > 0"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A dashboard, in a thread, of the runs of this test, which are there before it is asked for."""
    make_swarm_run()
    make_silo()
    with served([]) as url:
        yield url


@contextmanager
def serving(port: str = "0", *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that a dashboard prints, and its process."""
    command = [sys.executable, "-m", "swarm_node", "dashboard", "--port", port, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def rewards(round: int) -> dict[str, float]:
    return {"reward": round / 77, "reward/gcd": round / 50, "reward/lcm": 0.5}


def make_swarm_run() -> RunDir:
    run = RunDir("runs/alice")
    run.path.mkdir(parents=True)
    run.config.write_text('rounds = 90\nname = "alice"\n[policy]\nmodel = "starter"\n')
    for round in range(1, ROUNDS + 1):
        swarm = {"swarm/peers": 2.0, "swarm/groups_own": 4.0, "swarm/groups_used": 3.0, "swarm/bytes_in": 1e5 * round}
        speed = {"perf/generated_tok_s": 1000.0 + round, "entropy": 1 / round, "averaging/spread": 0.01}
        write(run.metrics, metrics(round, **rewards(round), **swarm, **speed))
    write(
        run.events, {"time": 1.0, "kind": "start", "text": "it begins"}, {"time": 2.0, "kind": "stop", "text": HOSTILE}
    )
    write(
        run.events, *({"time": 1.5, "kind": "join", "text": text} for text in ("others join with:", "swarm://it?peer="))
    )
    seven = {"text": "7", "extracted": "7", "reward": 1.0, "correct": True, "finished": True}
    evil = {"text": HOSTILE, "extracted": None, "reward": 0.0, "correct": False, "finished": False}
    write(run.samples, answered(20, seven, question=HOSTILE, peer="12D3KooWbobbobbob"))
    write(run.samples, answered(30, evil, seven, seven, task=HOSTILE, of=4))
    peer = {"present": True, "policy_version": 7, "muted": False}
    status: dict[str, Any] = {
        "swarm_name": "sums",
        "time": 1040.0,
        "since": 1000.0,
        "peer": "me",
        "traffic": {"bytes_in": 4e6, "bytes_out": 2_500_000.0},
        "received": {
            "swarm/groups_received": 133,
            "swarm/groups_admitted": 120,
            "swarm/groups_waiting": 3,
            "swarm/rejected/age": 10,
        },
        "sent": {"swarm/groups_sent": 50, "swarm/unsent/zero": 6},
        "refused": [
            {
                "source": "12D3KooWevilevil",
                "name": HOSTILE,
                "address": "203.0.113.9",
                "says": "1,204 × too many keys asked at once",
                "count": 1204,
                "hostile": 1204,
                "last": 1000.0,
            },
            {"source": "2001:db8::7", "says": HOSTILE, "count": 3, "hostile": 0, "last": 990.0},
        ],
        "peers": {
            "12D3KooWbobbobbob": {
                **peer,
                "name": "bob",
                "received": 100,
                "admitted": 98,
                "used": 90,
                "rejected": {"age": 2},
            },
            "12D3KooWevilevil": {
                **peer,
                "name": HOSTILE,
                "received": 30,
                "admitted": 22,
                "used": 30,
                "rejected": {"age": 8},
            },
        },
        "averaging": {
            "method": "noloco",
            "codec": "8bit",
            "when": "in pairs every 60 s",
            "cohort": "c0ffee",
            "partners": {"b": "bob"},
            "exchanges": 12,
            "bytes": 3e6,
            "spread": 0.01,
            "last": {"with": "bob", "time": 1039.0},
            "skipped": {"alone": 3},
            "refused": {"late": 2},
        },
        "crew": {
            "name": "secret",
            "count": 2,
            "lead": {"peer": "me", "name": "alice"},
            "whole": True,
            "updates": 40,
            "round": 40,
            "spares": 1,
            "held": [0],
            "replicas": {"1": 20},
            "recovered": {"replica": 1},
            "stages": [
                {"layers": [0, 0], "peer": "me", "name": "alice"},
                {"layers": [1, 3], "peer": "12D3KooWbobbobbob", "name": "bob"},
            ],
        },
    }
    run.write_status(status)
    write_held_out(run, before=0.25, after=0.75)
    return run


def write_held_out(run: RunDir, before: float, after: float) -> None:
    """A checkpoint with held-out figures of two tasks, of which no checker judges the second."""

    def evaluation(pass_1: float, said: str) -> dict[str, Any]:
        held = {"questions": 2, "pass_1": pass_1, "pass_k": 1.0, "reward": pass_1}
        unjudged = {"questions": 1, "pass_1": None, "pass_k": None}
        shown = {"task": "gcd", "question": HOSTILE, "right": "7", "answer": said, "correct": said == "7"}
        table = {"gcd": held, "lcm": unjudged, "all": held}
        return {"table": table, "by_question": [pass_1] * 20, "labels": ["gcd"] * 20, "shown": [shown]}

    figures = {"before": evaluation(before, "6"), "last": evaluation(after, "7"), "round": ROUNDS}
    folder = run.checkpoints / f"round-{ROUNDS:08}"
    folder.mkdir(parents=True)
    state = {"held_out_figures": figures, "held_out": {"samples": 8}}
    (folder / "state.json").write_text(json.dumps({"round": ROUNDS, "state": state}))


def make_silo() -> None:
    run = RunDir("runs/silo")
    run.path.mkdir(parents=True)
    run.config.write_text("rounds = 30\n")
    write(run.metrics, *(metrics(round, reward=0.25) for round in range(1, 31)))


def figure(browser: Chromium, name: str) -> str:
    parts = f"document.querySelector('[data-figure={name}]').parentNode.children"
    text: str = browser.value(f"[...{parts}].map(part => part.textContent).join(' ')")
    return text


def rows(browser: Chromium, label: str) -> list[list[str]]:
    selector = json.dumps(f"[aria-label='{label}'] tbody tr")
    found: list[list[str]] = browser.value(
        f"[...document.querySelectorAll({selector})].map(row => [...row.children].map(cell => cell.textContent))"
    )
    return found


def foreign_texts(browser: Chromium) -> set[str]:
    """The elements that hold a stranger's text, among questions and answers."""
    texts = "document.evaluate('//*[contains(@class, \"sample\")]//text()', document, null, 7)"
    found: list[str] = browser.value(
        f"(texts => [...Array(texts.snapshotLength).keys()].map(i => texts.snapshotItem(i)))({texts})"
        f".filter(text => text.data.includes({json.dumps(HOSTILE)})).map(text => text.parentElement.tagName)"
    )
    return set(found)


def test_the_page_says_what_the_files_say(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    first, last = (fmean(rewards(round)["reward"] for round in part) for part in (range(1, 5), range(37, 41)))
    assert figure(browser, "reward") == f"Reward {first:.3f} → {last:.3f} first to last tenth of rounds"
    assert figure(browser, "rounds") == "Rounds 40 of 90 in 40 s"
    gain = "+0.500, more than noise (95 %: +0.500 to +0.500)"
    assert figure(browser, "held_out") == f"Held-out pass@1 0.250 → 0.750 after round 40 {gain}"
    assert rows(browser, "Held-out questions of alice") == [["gcd", "2", "0.250", "0.750"], ["lcm", "1", "–", "–"]]
    assert "Before training\tAfter round 40" in browser.value(f"document.querySelector({HELD_OUT}).innerText")
    for stale in ("tok_s", "peers", "machine"):
        assert not browser.value(f"!!document.querySelector('[data-figure={stale}]')"), "the run has ended"
    assert f"ended {ENDED}, " in browser.value("document.querySelector('h2.run').textContent")
    assert figure(browser, "groups") == "Groups trained on 160 + 120 own + foreign"
    assert figure(browser, "bytes") == f"Network 4.00 MB in 2.50 MB out {SINCE}"
    assert figure(browser, "exchanges") == "Weights averaged 12 times"
    assert browser.value("document.querySelector('[data-figure=state]').textContent") == "ended"
    assert rows(browser, "Peers of alice") == [
        ["bob …obbobbob", "here", "7", "100", "98", "90", "2 × too old"],
        [f"{HOSTILE} …evilevil", "here", "7", "30", "22", "30", "8 × too old"],
    ]
    assert [row[:3] for row in rows(browser, "Refused by alice")] == [
        [f"{HOSTILE} …evilevil", "203.0.113.9", "1,204 × too many keys asked at once"],
        ["2001:db8::7", "–", HOSTILE],
    ]
    assert rows(browser, "Stages of alice") == [
        ["Stage 0", "0", "this node", "–"],
        ["Stage 1", "1–3", "bob …obbobbob", "20"],
    ]
    text = browser.value("document.body.innerText")
    for part in (
        "Received 133 groups, admitted 120, 3 never examined. Not used or refused: 10 × too old. "
        f"Sent 50 groups; not sent: 6 × all rewarded alike (this node used them all the same). Counted {SINCE}.",
        f"12, last with bob at {ENDED[:10]}",
        "in pairs every 60 s, noloco, 8bit",
        "Partners at the end",
        "3 × alone",
        "2 stages, whole",
        "1 by replica",
    ):
        assert part in text
    assert "secret" not in text
    assert browser.value("[...document.querySelectorAll('#event-list .text')].map(e => e.textContent)") == [
        HOSTILE,
        "it begins",
    ]
    groups = browser.value(
        "[...document.querySelectorAll('#details .sample')].map(e => e.innerText.split('\\n').filter(Boolean))"
    )
    assert groups == [
        [f"{HOSTILE} round 30 · own · mean reward 0.50", "What is 30?", "right: 7"]
        + ["1.00 7 · 2 times", f"0.00 {HOSTILE} · cut off · no answer found", "and 1 more answers"],
        ["gcd round 20 · bob …obbobbob · 1 answer kept", HOSTILE, "right: 7", "1.00 7"],
    ]
    assert foreign_texts(browser) == {"BDI"}
    assert browser.value("document.querySelectorAll('main img').length") == 0
    assert browser.value("document.title") == "alice: ended – swarm-node"
    assert browser.errors == []


def test_a_training_run_shows_figures_of_now(browser: Chromium, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "FRESH_S", 3600.0)  # a slow browser does not let the run wait
    machine = {"machine/cpu_cores": 1.5, "machine/cores": 2.0, "machine/memory_bytes": 2.0**30}
    speed = {"perf/generated_tok_s": 1036.0, "swarm/peers": 2.0}
    with RunDir.open("runs/alice") as run:
        write(run.metrics, metrics(41, **rewards(41), **machine, **speed) | {"time": time.time()})
        browser.open(f"{url}#alice")
        browser.wait("document.querySelector('[data-figure=state]')?.textContent === 'training'")
        assert figure(browser, "rounds").startswith("Round 41 of 90")
        assert figure(browser, "tok_s").startswith("Tokens a second 1,03")
        assert figure(browser, "machine") == "This machine 1.5 of 2 cores 1.00 GiB of memory"
        assert figure(browser, "peers") == "Other members 2"
        run.write_waits("quiet hours, 22:00-07:00")
        browser.wait("document.querySelector('[data-figure=state]').textContent === 'paused'")
        assert not browser.value("!!document.querySelector('[data-figure=tok_s], [data-figure=machine]')")
    assert browser.errors == []


def test_held_out_figures_begin_before_training(browser: Chromium, url: str) -> None:
    write(RunDir("runs/alice").metrics, metrics(41, **{"eval/pass_1": 0.5, "eval/pass_k": 0.75}))
    browser.open(f"{url}#alice")
    browser.wait(
        "[...document.querySelectorAll('figure .title')].some(title => title.textContent === 'Held-out questions')"
    )
    texts = "[...document.querySelectorAll('figure:not([hidden]) > .unseen')].map(text => text.textContent)"
    browser.wait(f"{texts}.includes('pass@1: 0.250 at first, 0.500 at the end; pass@8: 1 at first, 0.750 at the end')")
    browser.value("window.figure = document.querySelector('[aria-label=\"Held-out questions\"]').closest('figure')")
    browser.value("figure.querySelector('details').open = true")
    browser.wait("!!figure.querySelector('details table')")
    assert rows(browser, "Values of Held-out questions") == [
        ["0", "0.250", "1"],
        ["40", "0.750", "1"],
        ["41", "0.500", "0.750"],
    ]
    asked = "[...document.querySelectorAll('#learned .sample')].map(e => e.innerText.split('\\n').filter(Boolean))"
    assert browser.value(asked) == [
        ["gcd", HOSTILE, "right: 7", "before: 6 · 2 of 8 right", "after round 40: 7 · 6 of 8 right"]
    ]
    assert browser.errors == []


LARGE = "[...document.querySelectorAll('#first figure:not([hidden]) .title')].map(title => title.textContent).join()"


def test_a_run_goes_by_the_reward_that_counts(browser: Chromium, url: str) -> None:
    """Where the checker does not count, no flat pass@1 is shown in its place, and no rewarded answer is red."""
    run = RunDir("runs/own")
    run.path.mkdir()
    run.config.write_text('rounds = 9\n[rewards]\nchecker_weight = 0\nfunctions = [{path = "m.py:f"}]\n')
    Path("m.py").touch()
    for round in range(1, 6):
        write(run.metrics, metrics(round, **{"eval/pass_1": 0.0, "eval/pass_k": 0.0, "eval/reward": round / 10}))
    write(
        run.events, {"time": 1.0, "kind": "start", "text": "it begins"}, {"time": 2.0, "kind": "summary", "text": "."}
    )
    answers = [
        {"text": text, "extracted": text, "reward": reward, "correct": False, "finished": True}
        for text, reward in (("best", 1.0), ("mean", 0.5), ("worst", 0.0))
    ]
    write(run.samples, answered(5, *answers, reward=0.5))
    browser.open(f"{url}#own")
    browser.wait(READY)
    browser.wait(f"{LARGE} === 'Reward,Held-out questions: reward'")
    small = "[...document.querySelectorAll('#charts figure:not([hidden]) .title')].map(title => title.textContent)"
    assert "Held-out questions" in browser.value(small), "pass@1 stays as one of the small charts"
    colours = "[...document.querySelectorAll('#details .sample li > span')].map(e => [e.textContent, e.className])"
    assert browser.value(colours) == [["1.00", "up"], ["0.50", ""], ["0.00", "down"]]
    assert figure(browser, "reward") == "Reward 0.050 in the last of 5 rounds, too few for a trend"
    browser.open(f"{url}#own&alice")
    browser.wait(f"{LARGE} === 'Reward,Held-out questions'")  # of unlike runs pass@1, which both have
    assert browser.errors == []


def test_a_run_that_no_command_goes_on_with_says_what_does(browser: Chromium, url: str) -> None:
    config = RunDir("runs/alice").config
    commands = "document.querySelector('.commands').innerText"
    browser.open(f"{url}#alice")
    browser.wait(READY)
    assert " resume runs/alice\n" in browser.value(commands) + "\n"
    config.write_text('rounds = 90\n[policy]\nmodel = "starter"\n[rewards]\nfunctions = [{path = "__main__:<f>"}]\n')
    browser.wait(f"{commands}.includes('start the program again that gave it')")
    assert "'__main__:<f>'" in browser.value(commands) and "resume" not in browser.value(commands)
    config.write_text('rounds = 40\n[policy]\nmodel = "starter"\n')
    browser.wait(f"{commands}.includes(' resume runs/alice --rounds 80')")
    assert browser.errors == []


DRAWN = """(() => [1150, 640, 330].flatMap(width => [...Array(120).keys()].map(i => {
  const seconds = Math.round(30 * 1.12 ** i), chart = new Chart("");
  document.body.append(chart.node);
  chart.node.style.width = `${width}px`;
  chart.show([{ label: "", color: "c0", x: [0, seconds], y: [0, 1], raw: null }], { axis: "time" });
  const labels = [...chart.svg.querySelectorAll(".tick")].filter(e => +e.getAttribute("y") === chart.height - 6);
  chart.node.remove();
  return [seconds, labels.map(e => e.textContent)];
})))()"""


def test_no_two_labels_of_a_time_axis_are_equal(browser: Chromium, url: str) -> None:
    """Whatever the time from half a minute to a year, and on screens of three widths."""
    browser.open(f"{url}#alice")
    browser.value("import('./chart.js').then(module => { window.Chart = module.Chart; }) && null")
    browser.wait("!!window.Chart")
    drawn = browser.value(DRAWN)
    assert len(drawn) == 360
    assert [(seconds, labels) for seconds, labels in drawn if len(set(labels)) < len(labels) or len(labels) < 4] == []
    assert browser.errors == []


def test_curves_are_read_by_keyboard_and_table(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    browser.value("document.getElementById('smoothing').value = '0'")
    browser.value("document.getElementById('smoothing').dispatchEvent(new Event('change'))")
    browser.wait("!!document.querySelector('#first .line') && !document.querySelector('#first .raw')")
    ticks = browser.value("[...document.querySelectorAll('#first .tick')].map(tick => tick.textContent)")
    assert {"0", "0.2", "round", "1", "40"} <= set(ticks), "both axes have numbers, the first and last round among them"
    browser.value("document.querySelector('#first svg').focus()")
    browser.key("Home")
    readout = "document.querySelector('#first .readout').innerText"
    assert browser.wait(readout).split("\n") == ["round 1", f"{rewards(1)['reward']:.3f}"]
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.value(readout).split("\n") == ["round 3", f"{rewards(3)['reward']:.3f}"]
    browser.key("Escape")
    assert browser.value("document.querySelector('#first .readout').hidden")
    browser.value("document.querySelector('#first details').open = true")
    browser.wait("!!document.querySelector('#first details table')")
    table = rows(browser, "Values of Reward")
    assert [row[0] for row in table] == ["1", "5", "9", "13", "17", "21", "24", "28", "32", "36", "40"]
    assert [row[1] for row in table] == [f"{rewards(int(row[0]))['reward']:.3f}" for row in table]
    assert browser.value("[...document.querySelectorAll('#task-charts .title')].map(e => e.textContent)") == [
        "gcd",
        "lcm",
    ]
    label = browser.value("document.querySelector('#first .unseen').textContent")
    assert label == f"Reward: {rewards(1)['reward']:.3f} at first, {rewards(40)['reward']:.3f} at the end"


def test_a_stacked_chart_tells_each_part(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    browser.value("window.figure = document.querySelector('[aria-label=\"Groups trained on\"]').closest('figure')")
    assert browser.value("figure.querySelector('figcaption small').textContent") == "a round, stacked"
    told = browser.value("figure.querySelector(':scope > .unseen').textContent")
    assert told == "own: 4 at first, 4 at the end; foreign: 3 at first, 3 at the end"
    assert browser.errors == []


def test_a_whole_new_round_appears_by_itself(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    with open("runs/alice/metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics(41, **rewards(41))) + "\n" + json.dumps(metrics(42))[:20])
    browser.wait("document.querySelector('[data-figure=rounds]').textContent === '41'")
    with open("runs/alice/metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics(42))[20:] + "\nnonsense\n")
    browser.wait("document.querySelector('[data-figure=rounds]').textContent === '42'")
    notice = browser.wait("document.querySelector('.notice')?.textContent")
    assert notice == "line 43 of runs/alice/metrics.jsonl is no record and is left out"
    Path("runs/alice/metrics.jsonl").rename("runs/alice/metrics.jsonl.1")
    write(Path("runs/alice/metrics.jsonl"), metrics(1))
    browser.wait("document.querySelector('[data-figure=rounds]').textContent === '1'")
    assert browser.errors == []


def test_running_totals_go_on_over_a_restart(browser: Chromium, url: str) -> None:
    received = (round if round <= 601 else round - 601 for round in range(1, 1102))
    records = [metrics(i, **{"swarm/groups_admitted": float(n)}) for i, n in enumerate(received, 1)]
    RunDir("runs/long").path.mkdir()
    write(RunDir("runs/long").metrics, *records)
    browser.open(f"{url}#long")
    browser.wait(READY)
    texts = "[...document.querySelectorAll('figure:not([hidden]) > .unseen')].map(text => text.textContent)"
    assert "admitted: 2 at first, 1,101 at the end" in browser.value(texts)


def test_a_bootstrap_comes_last_without_training_figures(browser: Chromium, url: str) -> None:
    boot = RunDir("runs/bootstrap")
    boot.path.mkdir()
    boot.config.write_text('[policy]\nmodel = "starter"\n')
    boot.write_status({"role": "bootstrap", "swarm_name": "sums", "time": time.time(), "peers": {}})
    with RunDir.open(boot.path), RunDir.open("runs/alice") as alice:
        for run in (boot, alice):
            os.utime(run.path / "lock", (1000, 1000))
        alice.write_waits("quiet hours, 22:00-07:00")
        browser.open(url)
        browser.wait(READY)
        assert browser.value("location.hash") == "#alice"
        chips = "[...document.querySelectorAll('#runs label')].map(label => label.innerText.replace(/\\s+/g, ' '))"
        assert browser.value(chips) == ["alice paused, round 40", "bootstrap running", "silo ended, round 30"]
        browser.open("about:blank")
        browser.open(f"{url}#bootstrap")
        browser.wait("!!document.querySelector('[data-figure=peers]')")
        shown = browser.value("document.getElementById('main').innerText")
        assert shown.split("\n")[0].startswith("bootstrap") and "swarm sums" in shown
        assert not [word for word in ("starter", "Reward", "Round", "Tokens", "Training", "Peers") if word in shown]
        assert browser.value("document.querySelectorAll('figure:not([hidden])').length") == 0
    assert browser.errors == []


def test_short_rounds_have_two_digits(browser: Chromium, url: str) -> None:
    RunDir("runs/quick").path.mkdir()
    write(RunDir("runs/quick").metrics, metrics(1, step_time=0.0434))
    browser.open(f"{url}#quick")
    browser.wait(READY)
    assert figure(browser, "rounds") == "Rounds 1 in 0.043 s"


def test_figures_that_are_not_comparable_are_named(browser: Chromium, url: str) -> None:
    RunDir("runs/silo").config.write_text(
        'rounds = 30\n[eval]\ntasks = ["test.jsonl"]\n[rewards]\npartial = true\n[rollouts]\nmax_new_tokens = 16\n'
    )
    write_held_out(RunDir("runs/silo"), before=0.25, after=0.75)
    browser.open(f"{url}#alice&silo")
    browser.wait("document.querySelectorAll('#figures p').length === 3")
    assert browser.value("[...document.querySelectorAll('#figures p')].map(text => text.textContent)") == [
        "Held-out questions differ: held-out figures are not comparable.",
        "Held-out answers are sampled differently: held-out figures are not comparable.",
        "Rewards differ: mean rewards are not comparable.",
    ]
    assert browser.errors == []


def test_several_runs_are_shown_side_by_side(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    browser.value("document.querySelector('[data-run=silo]').focus()")
    browser.key(" ")
    browser.wait("document.querySelectorAll('[aria-label=\"Key figures of the runs\"] tbody tr').length === 2")
    table = rows(browser, "Key figures of the runs")
    assert [row[0] for row in table] == ["alice", "silo"]
    heads = (
        "[...document.querySelectorAll('[aria-label=\"Key figures of the runs\"] thead th')].map(e => e.textContent)"
    )
    assert "Own groups" in browser.value(heads) and "Other members" not in browser.value(heads), "both have ended"
    assert not browser.value("!!document.querySelector('#figures p')"), "both have the same questions and rewards"
    assert table[1][1:6] == ["ended", "30", "0.250", "0.250", "–"]
    assert browser.value("document.querySelectorAll('#first figure:first-child .line').length") == 2
    assert browser.value(
        "[...document.querySelectorAll('#first figure:first-child .legend .key')].map(e => e.textContent)"
    ) == [
        "alice",
        "silo",
    ]
    assert browser.value("location.hash") == "#alice&silo"


def test_it_fits_a_phone_and_follows_the_dark(browser: Chromium, url: str) -> None:
    backgrounds = set()
    for dark in (False, True):
        browser.open(f"{url}#alice", width=360, height=740, dark=dark)
        browser.wait(READY)
        assert browser.value("document.documentElement.scrollWidth") == 360
        backgrounds.add(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


def test_a_phone_shows_the_main_facts_unfolded(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice", width=390, height=740)
    browser.wait(READY)
    assert browser.value("document.documentElement.scrollHeight") < LONGEST_PHONE_PX
    shown = browser.value("document.getElementById('main').innerText")
    for fact in ("0.250 → 0.750", "more than noise", "swarm-node resume runs/alice", "What is 30?", "right: 7"):
        assert fact in shown
    assert "8 × too old" not in shown, "peers are folded"
    fold = "document.querySelector('[aria-label=\"Peers of alice\"] details')"
    browser.value(f"{fold}.querySelector('summary').click()")
    change_status(RunDir("runs/alice"), traffic={"bytes_in": 9e6, "bytes_out": 1.0})
    browser.wait("document.querySelector('[data-figure=bytes]').textContent === '9.00 MB in'")
    assert browser.value(f"{fold}.open"), "news fold nothing"
    assert "8 × too old" in browser.value("document.getElementById('main').innerText")
    assert browser.errors == []


CONNECTION = "document.getElementById('connection').textContent"


def change_status(run: RunDir, **more: Any) -> None:
    run.write_status(json.loads(run.status.read_text()) | more)


def test_it_tries_again_until_it_is_let_in(browser: Chromium, tmp_path: Path) -> None:
    make_swarm_run()
    with serving() as (url, _):
        port = url.rsplit(":", 1)[1].strip("/")
        browser.open(f"{url}#alice")
        browser.wait(READY)
        browser.value("{ const later = setTimeout; setTimeout = (run, ms) => later(run, ms / 10); }")
    browser.wait(f"{CONNECTION} === 'connection lost, trying again'")
    with serving(port, "--host", "0.0.0.0") as (address, _):  # the same address, and now a token is asked for
        browser.wait(f"{CONNECTION}.startsWith('no token: open the address that `swarm-node dashboard` printed')")
        assert "token=" in address
    browser.wait(f"{CONNECTION} === 'connection lost, trying again'")
    with serving(port):
        browser.wait(f"{CONNECTION} === 'live'")
        write(Path("runs/alice/metrics.jsonl"), metrics(41))
        browser.wait("document.querySelector('[data-figure=rounds]').textContent === '41'")


def test_a_silent_connection_is_lost(browser: Chromium, tmp_path: Path) -> None:
    run = make_swarm_run()
    with serving() as (url, process):
        browser.open(f"{url}#alice")
        browser.wait(READY)
        browser.value("{ const later = setTimeout; setTimeout = (run, ms) => later(run, ms / 10); }")
        write(run.metrics, metrics(41))
        browser.wait("document.querySelector('[data-figure=rounds]').textContent === '41'")
        process.send_signal(signal.SIGSTOP)  # as when a tunnel has died: open, and silent
        browser.wait(f"{CONNECTION} === 'connection lost, trying again'")
        process.send_signal(signal.SIGCONT)
        browser.wait(f"{CONNECTION} === 'live'")


def test_news_take_neither_focus_nor_selection_nor_place(browser: Chromium, url: str) -> None:
    run = RunDir("runs/alice")
    browser.open(f"{url}#alice", width=660)
    browser.wait(READY)
    region = "document.querySelector('[role=region][aria-label=\"Peers of alice\"]')"
    browser.value("document.adoptedStyleSheets = [new CSSStyleSheet()]")
    browser.value("document.adoptedStyleSheets[0].replaceSync('.scroll { width: 300px }')")
    browser.value("getSelection().selectAllChildren([...document.querySelectorAll('#event-list .text')].at(-1))")
    browser.value(f"window.before = {region}; before.scrollLeft = 40; before.focus()")
    peers = json.loads(run.status.read_text())["peers"]
    peers["12D3KooWevilevil"]["used"] = 5000  # and is above bob now
    del peers["12D3KooWbobbobbob"]["rejected"]
    status = json.loads(run.status.read_text())
    change_status(run, peers=peers, traffic={"bytes_in": 9e6, "bytes_out": 1.0}, averaging=None)
    write(run.events, {"time": 3.0, "kind": "note", "text": "something new"})
    browser.wait("document.querySelector('#event-list .text').textContent === 'something new'")
    browser.wait("document.querySelector('[data-figure=bytes]').textContent === '9.00 MB in'")
    assert [row[5] for row in rows(browser, "Peers of alice")] == ["5,000", "90"]
    assert [row[6] for row in rows(browser, "Peers of alice")] == ["8 × too old", "none"]
    assert not browser.value("!!document.querySelector('[aria-label=\"Averaging of weights of alice\"]')")
    kept = f"[document.activeElement === window.before && {region} === window.before, {region}.scrollLeft]"
    assert browser.value(kept) == [True, 40]
    assert browser.value("getSelection().toString()") == "it begins"
    run.write_status(status)
    browser.wait("!!document.querySelector('[aria-label=\"Averaging of weights of alice\"]')")
    assert browser.value(kept) == [True, 40]
    widths = "[...document.querySelectorAll('.fill')].map(bar => bar.style.width)"
    assert browser.value(widths) == ["100%", f"{100 * 30 / 90:.4f}%"]
    assert browser.errors == []


def test_a_new_round_leaves_a_table_in_place(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    browser.value("document.querySelector('#first details').open = true")
    browser.wait("!!document.querySelector('#first details table')")
    browser.value("document.querySelector('#first details [role=region]').focus()")
    write(RunDir("runs/alice").metrics, metrics(41, **rewards(41)))
    browser.wait("document.querySelector('#first details tbody tr:last-child th').textContent === '41'")
    assert browser.value("document.activeElement.getAttribute('aria-label')") == "Values of Reward"


def test_a_chosen_curve_bears_its_metric_s_name(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    browser.value("window.figure = document.querySelector('[aria-label=\"Metric of curve 1\"]').closest('figure')")
    browser.value("window.choice = figure.querySelector('select')")
    browser.value("choice.value = 'entropy', choice.dispatchEvent(new Event('change'))")
    browser.value("figure.querySelector('details').open = true")
    browser.wait("figure.querySelector('.unseen').textContent.startsWith('entropy: 0.')")
    browser.wait("figure.querySelector('thead')?.textContent === 'roundentropy'")
    assert browser.value("figure.querySelector('[role=region]').getAttribute('aria-label')") == "Values of entropy"
    assert browser.value("figure.querySelector('summary').textContent") == "Values of entropy"
    assert browser.value("figure.querySelector('svg').getAttribute('aria-label')") == "entropy"


def test_a_pause_and_its_reason_are_shown(browser: Chromium, url: str) -> None:
    run = RunDir("runs/alice")
    with RunDir.open(run.path):
        change_status(run, time=time.time(), paused="quiet hours, 22:00-07:00")
        browser.open(f"{url}#alice")
        browser.wait(READY)
        browser.wait("document.querySelector('[data-figure=state]').textContent === 'paused'")
        assert "paused quiet hours, 22:00-07:00" in browser.value("document.querySelector('h2.run').textContent")
        assert browser.value("document.title") == "alice: paused – swarm-node"


def test_a_lost_stage_and_its_silent_holder_show(browser: Chromium, url: str) -> None:
    run = RunDir("runs/alice")
    bob = "12D3KooWbobbobbob"
    crew = json.loads(run.status.read_text())["crew"] | {"whole": False, "absent": [bob]}
    crew["stages"][1]["missing"] = {"since": time.time() - 3600, "taker": {"peer": "me", "name": HOSTILE}}
    change_status(run, crew=crew)
    browser.open(f"{url}#alice")
    browser.wait(READY)
    [_, [_, layers, holder, _]] = rows(browser, "Stages of alice")
    assert (layers, holder) == ("1–3", f"lost 60 min ago, being rebuilt by {HOSTILE} …me")
    assert [row[1] for row in rows(browser, "Peers of alice")] == ["silent", "here"]
    assert "2 stages, not whole" in browser.value("document.body.innerText")
    crew["stages"][1]["missing"]["taker"] = None
    change_status(run, crew=crew)
    held = "document.querySelector('[aria-label=\"Stages of alice\"] tbody tr:last-child').children[2].textContent"
    browser.wait(f"{held} === 'lost 60 min ago, held by nobody'")
    crew["stages"][1]["missing"], crew["absent"] = None, []
    change_status(run, crew=crew)
    browser.wait(f"{held} === 'bob …obbobbob'")
    assert rows(browser, "Peers of alice")[0][1] == "here" and browser.errors == []


def test_a_run_that_comes_back_is_there_again(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    Path("runs/alice").rename("aside")
    browser.wait("document.querySelector('.notice')?.textContent === 'alice is not there any more'")
    Path("aside").rename("runs/alice")
    browser.wait("document.querySelector('.notice') === null")
    assert figure(browser, "rounds").startswith("Rounds 40 of 90")


def test_costs_are_shown_where_prices_are(browser: Chromium, url: str) -> None:
    browser.open(f"{url}#alice")
    browser.wait(READY)
    assert not browser.value("!!document.querySelector('[data-figure=cost]')")
    cost = {"cost/spent": 1.5, "cost/groups": 7000, "cost/per_admitted_group": 1.5 / 7000}
    write(RunDir("runs/alice").metrics, metrics(41, **cost))
    browser.wait("!!document.querySelector('[data-figure=cost]')")
    assert figure(browser, "cost") == "Spent 1.5 0.000214 a group"
    write(RunDir("runs/alice").metrics, metrics(42, **cost, **{"cost/per_reward_point": 1234.5}))
    browser.wait("document.querySelector('[data-figure=cost]').parentNode.textContent.includes('point')")
    assert figure(browser, "cost") == "Spent 1.5 0.000214 a group 1,235 a point of reward"
    browser.open(f"{url}#alice&silo")
    browser.wait("document.querySelectorAll('[aria-label=\"Key figures of the runs\"] tbody tr').length === 2")
    assert [row[-1] for row in rows(browser, "Key figures of the runs")] == ["1.5", "–"]
