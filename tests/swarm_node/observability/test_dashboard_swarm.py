"""The page of a swarm in the dashboard: what is listed and who may read it; in a browser, what it shows."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from swarm_node.cli.commands.page import listens_at, page_process, show_pages
from swarm_node.config import NetworkConfig, NodeConfig
from swarm_node.errors import UserError
from swarm_node.observability.dashboard.app import make_app, qr_code
from swarm_node.observability.dashboard.gallery import Gallery
from swarm_node.observability.dashboard.serve import serve
from swarm_node.storage.rundir import RunDir
from tests.support.chromium import Chromium
from tests.support.dashboards import served
from tests.support.ports import free_port
from tests.support.run_files import metrics, write
from tests.support.waiting import until

HOSTILE = "<img src=x onerror=document.title='owned'>"
LINK = f"swarm://{'ab' * 32}?peer=/ip4/203.0.113.5/tcp/31330/p2p/12D3KooWboot&peer=/ip4/203.0.113.6/tcp/1/p2p/12D3KooWb"
ROW = {"roles": ["trainer"], "updates": 7, "tokens_per_s": 300.0, "family": "llama"}
SAYS = {"since": 1.0, "version": "0.1.0", "kinds": {"gcd": [8, 4]}, "pass_1": 0.375, "questions": 9, "used": 3}
PAGE: dict[str, Any] = {
    "link": LINK,
    "members": 2,
    "training": 2,
    "tokens_per_s": 400.0,
    "declaring": 1,
    "history": [[1000.0, 0.25, None], [1600.0, 0.375, 0.125], [2200.0, 0.5, 0.375]],
    "kinds": [
        {"kind": "gcd", "members": 1, "success": 0.5, "share": 0.75},
        {"kind": "lcm", "members": 1, "success": 0.0, "share": 0.25},
    ],
    "rows": [
        {"peer": "12D3KooWalice", "name": "alice", "declared": SAYS, **ROW},
        {"peer": "12D3KooWevil", "name": HOSTILE, "declared": None, **ROW, "tokens_per_s": 100.0},
    ],
}


def page_run(**more: Any) -> RunDir:
    run = RunDir("pages/sums")
    run.path.mkdir(parents=True)
    told = {"role": "page", "swarm": "ab" * 32, "swarm_name": "sums", "time": time.time(), "page": PAGE}
    run.write_status(told | more)
    return run


def alice() -> RunDir:
    run = RunDir("runs/alice")
    run.path.mkdir(parents=True)
    run.config.write_text('name = "alice"\n')
    for round in range(1, 4):
        write(run.metrics, metrics(round, reward=0.5, **{"swarm/peers": 1.0}))
    worth = {
        "by_others": {"kinds": ["gcd"], "first": 0.1, "now": 0.6},
        "own_groups": 20,
        "others_groups": 30,
        "unsolved": 124,
        "pass_1": 0.4,
        "theirs": [0.375],
        "used_by_others": 1204,
        "share_of_used": 0.31,
        "declaring": 2,
    }
    status = {"swarm": "ab" * 32, "peer": "12D3KooWalice", "time": time.time(), "sent": {}, "peers": {}}
    run.write_status(status | {"worth": worth, "page": {name: PAGE[name] for name in PAGE if name != "rows"}})
    return run


def test_pages_come_first_and_train_nothing() -> None:
    alice()
    page_run()
    listed = Gallery([Path("runs"), Path("pages")]).list()
    assert [(each["id"], each["page"], each["trains"]) for each in listed] == [
        ("sums", True, False),
        ("alice", False, True),
    ]
    assert [each["path"] for each in listed] == ["", "runs/alice"], "strangers may read a page"


def test_only_pages_of_swarms_are_public() -> None:
    alice()
    with pytest.raises(UserError, match="--public is for pages of a swarm"):
        serve([Path("runs")], "127.0.0.1", 0, print, public=True)
    with pytest.raises(UserError, match="leave the runs out"):
        show_pages([LINK, "runs"], NetworkConfig(), "127.0.0.1", 0, True)


def test_a_run_that_comes_later_is_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.observability.dashboard.gallery.AT_MOST_EACH_S", 0.0)
    page_run()
    client = TestClient(make_app(gallery := Gallery([Path("pages")], public=True), None, None))
    assert client.get("/api/qr/sums").status_code == 200
    alice().path.rename("pages/alice")
    RunDir("pages/sums").config.write_text("rounds = 3\n")
    assert gallery.list() == [] and gallery.view("alice") is None
    assert client.get("/api/qr/sums").status_code == 404, "a run began in the directory of the page"


def test_settings_are_shown_without_secrets() -> None:
    run = alice()
    run.config.write_text(
        'name = "alice"\ntasks = ["small"]\n[pipeline]\ncrew = "our secret"\n'
        '[checkpoints]\nto = "s3://key:word@bucket/runs"\n[grpo]\nlearning_rate = 1e-3\n'
    )
    view = Gallery([]).view("alice")
    assert view is not None
    config = view.config()
    assert config == {
        "name": "alice",
        "tasks": '["small"]',
        "checkpoints.to": "s3://…@bucket/runs",
        "grpo.learning_rate": "0.001",
    }


def test_commands_fit_the_state_of_a_run() -> None:
    run = alice()
    view = Gallery([]).view("alice")
    assert view is not None and view.summary(time.time())["commands"] == {"go on": "swarm-node resume runs/alice"}
    with RunDir.open("runs/alice"):
        view.refresh()
        stop = {"stop": "swarm-node stop runs/alice"}
        assert view.state(time.time()) == "starting", "what its files say is of the start before"
        assert view.summary(time.time())["commands"] == {"pause": "swarm-node pause runs/alice"} | stop
        run.write_waits("it is Sunday")
        view.refresh()
        assert view.summary(time.time())["commands"] == {"unpause": "swarm-node unpause runs/alice"} | stop
    page_run()
    page = Gallery([Path("pages")]).view("sums")
    assert page is not None and page.summary(time.time())["commands"] == {}


def test_the_link_is_a_code_to_scan() -> None:
    page_run()
    alice()
    client = TestClient(make_app(Gallery([Path("pages"), Path("runs")]), None, None))
    answer = client.get("/api/qr/sums")
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/svg+xml"
    assert answer.content == qr_code(LINK) == qr_code(LINK.partition("&")[0])
    assert client.get("/api/qr/nobody").status_code == 404
    page_run_without_link = RunDir("pages/other")
    page_run_without_link.path.mkdir()
    page_run_without_link.write_status({"role": "page", "page": {"link": ["no", "text"]}})
    assert TestClient(make_app(Gallery([Path("pages")]), None, None)).get("/api/qr/other").status_code == 404


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        ("31380", ("", 31380)),
        ("auto", ("", None)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::]:auto", ("::", None)),
    ],
)
def test_a_page_listens_at_a_port_or_an_address(listen: str, found: tuple[str, int | None]) -> None:
    assert listens_at(listen) == found


@pytest.mark.parametrize("listen", ["", "port", "127.0.0.1:", "70000"])
def test_other_places_are_refused(listen: str) -> None:
    with pytest.raises(UserError, match="neither a port"):
        listens_at(listen)


def test_a_process_beside_shows_the_page_until_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    page_run()
    port = free_port()

    def asked() -> bytes:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=5) as answer:
                found: bytes = answer.read()
                return found
        except OSError:
            return b""

    with page_process(Path("pages"), str(port), NodeConfig(name="boot", log_format="json")):
        listed = json.loads(until(asked, 60.0))["runs"]
        assert [run["id"] for run in listed] == ["sums"]
    assert asked() == b""
    [line] = map(json.loads, capfd.readouterr().err.splitlines())
    assert (line["kind"], line["node"]) == ("page", "boot") and f"http://127.0.0.1:{port}/" in line["message"]


def test_the_page_ends_with_its_bootstrap() -> None:
    page_run()
    port = free_port()
    script = (
        "from pathlib import Path; from swarm_node.cli.commands.page import page_process\n"
        f"with page_process(Path('pages'), '{port}'): print('shown', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bootstrap:
        until(lambda: listens(port), 60.0)
        bootstrap.kill()
    until(lambda: not listens(port), 60.0)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_the_page_of_a_swarm_in_a_browser(browser: Chromium) -> None:
    page_run(page=PAGE | {"as_of": time.time() - 240})
    alice()
    with served([Path("pages"), Path("runs")]) as url:
        browser.open(url + "#sums&alice", width=390)
        browser.wait("document.querySelector('[data-figure=own_share]') && document.querySelector('.qr img')?.complete")
        text = browser.value("document.getElementById('main').innerText")
        for part in (
            *("Swarm sums", "nobody solves it", "0.50", "75 %", HOSTILE, "yours", "0.1.0"),
            *("success: 0.25 at first, 0.50 now", "held-out pass@1: 0.13 at first, 0.38 now", "as of 4 min ago"),
            *("swarm-node join 'swarm://", "The link with its first address"),
            *("0.10 → 0.60", "Questions only others solved\n124", "31 % of what others used (self-declared)"),
            *("30 of 50 from others 60 %", "at least 1,204 of its groups self-declared"),
            "Held-out pass@1 of others\n0.38 self-declared by 1",
        ):
            assert part in text, part
        assert browser.value("document.querySelector('[data-figure=own_share]').textContent") == "75 %"
        assert "0.40" not in text, "its own pass@1 is not what the swarm gave"
        ticks = "[...document.querySelectorAll('#swarm .tick')].map(tick => tick.textContent)"
        assert {"0", "0.2", "20 min"} <= set(browser.value(ticks))
        assert browser.value("document.querySelector('.qr img').naturalWidth > 0")
        assert browser.value("document.documentElement.scrollWidth") == 390
        assert browser.value("document.title") == "swarm sums – swarm-node"
        browser.value("document.querySelector('[data-copy]').click()")
        browser.wait("document.querySelector('[data-copy]').textContent !== 'Copy'")
        assert "The swarm" not in text.splitlines(), "it is above"
        assert browser.errors == []
        browser.open(url + "#sums", dark=True)
        browser.wait("document.querySelector('[data-figure=members]') !== null")
        assert browser.value("document.getElementById('settings').hidden"), "there is no curve to draw"
        assert "Your share" not in browser.value("document.getElementById('main').innerText")
        assert browser.errors == []


@pytest.mark.slow
def test_figures_that_nobody_tells_are_dashes(browser: Chromium) -> None:
    row = {"peer": "12D3KooWnew", "name": "new", "declared": None} | ROW | {"updates": 0, "tokens_per_s": 0.0}
    page_run(page=PAGE | {"rows": [row], "members": 1, "tokens_per_s": 0.0, "declaring": 0, "kinds": []})
    with served([Path("pages")]) as url:
        browser.open(url + "#sums", width=390)
        browser.wait("document.querySelector('[data-figure=unsolved]') !== null")
        for name in ("tokens_per_s", "success", "unsolved"):
            assert browser.value(f"document.querySelector('[data-figure={name}]').textContent") == "–", name
        cells = browser.value("[...document.querySelectorAll('tbody tr')].map((tr) => tr.innerText)")
        assert "0" not in "".join(cells), cells
        assert browser.errors == []


@pytest.mark.slow
def test_long_lists_begin_with_ten(browser: Chromium) -> None:
    rows = [{"peer": f"12D3KooW{i:08}", "name": f"member-{i}", "declared": None, **ROW} for i in range(40)]
    page_run(page=PAGE | {"rows": rows, "members": 40})
    for i in range(30):
        path = Path(f"runs/run-{i}")
        path.mkdir(parents=True)
        (path / "config.toml").write_text("rounds = 1\n")
        write(path / "metrics.jsonl", metrics(1, reward=0.5))
    with served([Path("pages"), Path("runs")]) as url:
        browser.open(url + "#sums", width=390)
        browser.wait("document.querySelector('[data-whole]') !== null")
        browser.wait("document.querySelectorAll('#runs li').length > 1")
        assert browser.value("document.querySelectorAll('#runs li').length") == 10
        assert browser.value("document.getElementById('more-runs').textContent") == "Show 21 more runs"
        listed = "document.querySelectorAll('tr[data-key*=KooW]').length"
        assert browser.value(listed) == 10
        assert browser.value("document.documentElement.scrollHeight") < 4000
        browser.value("document.querySelector('[data-whole]').click()")
        browser.wait(f"{listed} === 40")
        browser.value("document.getElementById('more-runs').click()")
        assert browser.value("document.querySelectorAll('#runs li').length") == 31
        assert browser.errors == []


@pytest.mark.slow
def test_runs_in_a_browser_fold_what_repeats(browser: Chromium) -> None:
    """Events of several starts, settings of two runs, and starts that failed."""
    run, other, failed = alice(), RunDir("runs/bob"), RunDir("runs/failed")
    for at in (86_400.0, 172_800.0):
        write(run.events, {"time": at, "kind": "start", "text": "policy starter"})
    for each in (other, failed):
        each.path.mkdir()
        each.config.write_text(f'name = "{each.path.name}"\n')
    write(other.metrics, metrics(1, reward=0.5))
    with served([Path("runs")]) as url:
        browser.open(url + "#alice&bob")
        browser.wait("document.getElementById('config-table')?.textContent.includes('name')")
        tabs = browser.value("document.getElementById('runs').innerText")
        assert "alice" in tabs and "bob" in tabs and "failed" not in tabs
        browser.value("document.getElementById('more-runs').click()")
        assert "failed" in browser.value("document.getElementById('runs').innerText")
        browser.wait("document.querySelectorAll('#event-list li').length === 1")
        said = browser.value("document.getElementById('event-list').innerText")
        assert "1970-01-0" in said and "policy starter said 2 times" in said
        assert browser.value("document.getElementById('config-title').textContent") == "Settings that differ"
        browser.value("document.getElementById('config-fold').open = true")
        assert "bob" in browser.value("document.getElementById('config-table').innerText")
        browser.open(url + "#alice")
        browser.wait("document.querySelector('.commands') !== null")
        assert "swarm-node resume runs/alice" in browser.value("document.getElementById('figures').innerText")
        assert browser.errors == []
