#!/usr/bin/env python3
"""Draw what the commands print, from real runs in terminals of 80 columns, and photograph their pages.

    python scripts/pictures.py swarm     # docs/images/swarm-terminals.svg: new, bootstrap, join, join, status
                                         # docs/images/dashboard.png: a member; swarm-page.png: the swarm
    python scripts/pictures.py demo      # docs/images/demo-end.svg: how the demo ends, with answers before and after

Each run is in a temporary directory. Nodes listen on 127.0.0.1 at free ports, by variables of the environment, so a
picture holds no address of this machine. The text is what a process printed. Needs pyte (`.[dev]`), and
Chromium for the pages, which are left out without it.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.terminal import TITLE, Run, Terminal, svg  # noqa: E402
from tests.support.chromium import Chromium, find_chromium  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LEAST_ROUND = 150  # of each member, when the picture is taken: the swarm is worth little in the first rounds
TYPED = "$ ", "starting"  # from the command to the first line that it prints
LEFT_OUT: list[Run] = [("⋮", TITLE, False)]
LOOPBACK = {"LISTEN": "127.0.0.1", "PORT": "0", "GOSSIP_PORT": "0"}
ADDRESS = re.compile(r"http://[\w.:]+/?")
WIDTH, HEIGHT = 1024, 960  # of a photograph, in pixels; one of a whole page is as high as that
RUNNING = re.compile(r"^round (\d+)\b.*?^1 other, ([\d.]+) of their groups", re.MULTILINE | re.DOTALL)


def environment() -> dict[str, str]:
    """Of the commands: this clone, its commands on the PATH, and this machine alone as the network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    network = {f"SWARM_NODE_NETWORK__{key}": value for key, value in LOOPBACK.items()}
    return {**os.environ, **network, "PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protocol'}"}


def is_sharing(text: str) -> bool:
    """Whether a screen shows a member that has warmed up and trains on another's groups."""
    found = RUNNING.search(text)
    return found is not None and int(found[1]) >= LEAST_ROUND and float(found[2]) > 0


def swarm(folder: Path) -> dict[str, bytes]:
    """Five commands in four terminals: a swarm of two members, as an SVG; the pages of one member and of the swarm, as
    PNG."""
    with ExitStack() as stack:

        def opened(command: str) -> Terminal:
            terminal = Terminal(command, folder, environment())
            stack.callback(terminal.stop)
            return terminal

        new = opened("swarm-node new --name demo --tasks small")
        new.ended()
        bootstrap = opened("swarm-node bootstrap demo.toml | tee link.txt")
        bootstrap.until(lambda text: "?peer=" in text)
        join = 'swarm-node join "$(tail -1 link.txt)" --name {} --set grpo.advantage=pass_k'
        members = [opened(join.format(name)) for name in ("alice", "bob")]
        for member in members:
            member.until(is_sharing)
        status = opened("swarm-node status runs/alice")
        status.ended()
        alice, bob = (member.lines() for member in members)
        link = TYPED, ("swarm://", "")
        told, bar = (TYPED, ("first time", "Answers of others")), ("round ", "")
        worth = ("$ ", "swarm "), ("members", "join link")
        panels = {
            "terminal 1: a swarm, and a bootstrap node through which others join": new.lines()
            + cut(bootstrap.lines(), *link),
            "terminal 2: a member": cut(alice, *told, bar),
            "terminal 3: another member": cut(bob, TYPED, bar),
            "terminal 4: what the first member got": cut(status.lines(), *worth),
        }
        title = "A swarm of two members on one machine: what new, bootstrap, join and status print"
        found = {"swarm-terminals.svg": svg(title, panels).encode()}
        if (chromium := find_chromium()) is None:
            print("no Chromium here: dashboard.png and swarm-page.png stay as they are", file=sys.stderr)
            return found
        browser = Chromium(chromium, folder / "browser")
        stack.callback(browser.close)
        member = opened("swarm-node dashboard runs/alice --port 0")
        found["dashboard.png"] = photograph(browser, member, "document.querySelector('.commands') !== null", False)
        page = opened('swarm-node dashboard "$(tail -1 link.txt)" --port 0')
        rows = "document.querySelectorAll('tr[data-key*=KooW]').length === 3"
        code = "document.querySelector('.qr img')?.complete && document.querySelector('#swarm .line') !== null"
        return found | {"swarm-page.png": photograph(browser, page, f"{rows} && {code}", True)}


def photograph(browser: Chromium, server: Terminal, ready: str, whole: bool) -> bytes:
    """The page that a command serves, as PNG, once a JavaScript expression is true. `whole`: down to its end."""
    server.until(ADDRESS.search)
    found = ADDRESS.search(server.text())
    assert found is not None, "it was there a moment ago"
    browser.open(found[0], WIDTH, HEIGHT)
    browser.wait(ready)
    if whole:
        height = browser.value("document.documentElement.scrollHeight")
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return base64.b64decode(browser.call("Page.captureScreenshot")["data"])


def demo(folder: Path) -> dict[str, bytes]:
    """The last lines of the demo, as an SVG."""
    terminal = Terminal(f"swarm-node local --config {ROOT}/configs/demo.toml", folder, environment())
    try:
        terminal.ended()
    finally:
        terminal.stop()
    title = "How the demo ends: three held-out questions with an answer before and after training, and what was learned"
    lines = cut(terminal.lines(), ("answers ", "files "))
    return {"demo-end.svg": svg(title, {"the end of make demo": lines}).encode()}


def cut(lines: Sequence[list[Run]], *stretches: tuple[str, str]) -> list[list[Run]]:
    """Stretches of the lines, with a mark for what is left out between them. Each goes from the last line that begins
    with its first text to the next line that begins with its second, or to the end if that is empty."""
    texts = ["".join(text for text, *_ in line) for line in lines]
    kept: list[list[Run]] = []
    for first, end in stretches:
        starts = [i for i, text in enumerate(texts) if text.startswith(first)]
        if not starts:
            raise SystemExit(f"no line begins with {first!r}:\n" + "\n".join(texts))
        ends = (i for i in range(starts[-1] + 1, len(texts)) if end and texts[i].startswith(end))
        kept += [LEFT_OUT] * bool(kept) + list(lines[starts[-1] : next(ends, len(texts))])
    return kept


PICTURES = {"swarm": swarm, "demo": demo}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=PICTURES)
    draw = PICTURES[parser.parse_args().picture]
    with tempfile.TemporaryDirectory() as folder:
        for file, content in draw(Path(folder)).items():
            (IMAGES / file).write_bytes(content)
            print(f"written to {IMAGES / file}")


if __name__ == "__main__":
    main()
