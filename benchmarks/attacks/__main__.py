"""What strangers could do to a swarm, and what they can do now: real nodes on loopback, one attack after the other.

    python -m benchmarks.attacks [NAME ...] [--checkout DIR] [--label LABEL]

decoder     nested msgpack in a store and in an answer, which ended every process that decoded it
link        the same, for `status`, `doctor` and `join` with a link that names the hostile peer
find        one key a thousand times in one find, sixteen times over: memory that was never freed
providers   provider records for made-up keys, to p2pd's own Kademlia
idle silent connections that hold the gossip hub's places: how many honest peers get in
slow        requests that never end: how many newcomers get the manifest
flood       five thousand cards of made-up members: do honest nodes see each other, and whom do they dial
eclipse     ids beside the keys of the membership buckets, made up, and of keys ground for it
admission   the largest legal answers, and one task slot answered four hundred times

Figures go to results/attacks.json under LABEL. `--checkout` attacks another version of this project, for comparison:
its nodes run from DIR, the attacks from here. `benchmarks.payload` has answers that are right and carry a payload.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.attacks.hostile import EXT_DICTIONARY, EXT_TUPLE
from benchmarks.attacks.swarm import Swarm, swarm, until
from benchmarks.common import RESULTS, machine, write_row
from benchmarks.processes import mind_signals

ROOT = Path(__file__).parent.parent.parent
HEALED_S = 60.0
COMMANDS = ("status", "doctor", "join")
Row = dict[str, Any]
START: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "cwd": ROOT}


def attack(module: str, *arguments: object, seconds: float) -> Row:
    """The figures of an attack; what it said last if it failed."""
    command = [sys.executable, "-m", f"benchmarks.attacks.{module}", *map(str, arguments)]
    done = subprocess.run(command, **START, timeout=seconds + 240)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": done.returncode, "said": lines[-1:]}
    return dict(json.loads(lines[-1]))


def decoder(folder: Path, checkout: Path) -> Row:
    rows = {}
    for depth in (250, 2000):
        for name, ext in (("tuple", EXT_TUPLE), ("dictionary", EXT_DICTIONARY)):
            for way in ("store", "answer"):
                case = f"{way} {depth} {name}"
                with swarm(folder / case.replace(" ", "-"), checkout) as it:
                    if way == "store":
                        told = attack("dht", "store", it.targets["alice"].address, it.id, depth, ext, seconds=20)
                    else:
                        told = attack("dht", "answer", it.targets["boot"].address, it.id, depth, ext, 25, seconds=25)
                    rows[case] = {**told, "nodes": len(it.targets), "alive": it.alive(), "refused": _refused(it)}
                    print(case, rows[case], flush=True)
    return rows


def link(folder: Path, checkout: Path) -> Row:
    rows: Row = {}
    for depth in (250, 2000):
        for name, ext in (("tuple", EXT_TUPLE), ("dictionary", EXT_DICTIONARY)):
            arguments = ["answer", "", "ab" * 32, str(depth), str(ext), "600"]
            command = [sys.executable, "-m", "benchmarks.attacks.dht", *arguments]
            evil = subprocess.Popen(command, **START)
            try:
                assert evil.stdout is not None
                it = Swarm(folder, checkout.resolve())
                found = f"swarm://{'ab' * 32}?peer={evil.stdout.readline().strip()}"
                codes = {}
                for what in COMMANDS:
                    run_dir = folder / f"{what}-{depth}-{name}"
                    join = ["--run-dir", str(run_dir), "--listen", "127.0.0.1", "--port", "0", "--gossip-port", "0"]
                    started = subprocess.Popen(
                        it.command(what, found, *(join if what == "join" else [])),
                        env=it.environment(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                    try:
                        codes[what] = started.wait(45)
                    except subprocess.TimeoutExpired:
                        started.terminate()
                        codes[what] = f"lives, ends with {started.wait(60)} when asked to"
            finally:
                evil.terminate()
                evil.communicate(timeout=30)
            rows[f"{depth} {name}"] = codes
            print("link", depth, name, codes, flush=True)
    return rows


def find(folder: Path, checkout: Path) -> Row:
    with swarm(folder, checkout, ["alice"]) as it:
        boot = it.targets["boot"]
        row = attack("dht", "find", boot.address, it.id, boot.pid, 16, seconds=120)
        return {**row, "alive": it.alive(), "refused": _refused(it)}


def providers(folder: Path, checkout: Path) -> Row:
    with swarm(folder, checkout, ["alice"]) as it:
        boot = it.targets["boot"]
        return attack("libp2p", "providers", boot.address, boot.part("p2pd"), 35, seconds=35)


def places(how: str) -> Callable[[Path, Path], Row]:
    def run(folder: Path, checkout: Path) -> Row:
        with swarm(folder, checkout) as it:
            row = attack("libp2p", how, _gossip_address(it), 30, seconds=60)
            return {**row, "alive": it.alive(), "refused": _refused(it)}

    return run


def slow(folder: Path, checkout: Path) -> Row:
    with swarm(folder, checkout, ["alice"]) as it:
        rows = {
            kind: attack("libp2p", "slow", it.targets["boot"].address, it.id, kind, 30, seconds=60)
            for kind in ("request", "exchange", "channel")
        }
        return {**rows, "refused": _refused(it)}


def flood(folder: Path, checkout: Path) -> Row:
    with swarm(folder, checkout) as it, bystander() as (port, dials):
        addresses = [target.address for target in it.targets.values()]
        command = [sys.executable, "-m", "benchmarks.attacks.cards", it.id, "5000", "95", str(port), *addresses]
        evil = subprocess.Popen(command, **START)
        began = time.monotonic()
        time.sleep(15)  # all cards are there, and the newcomer finds a full house
        it.join("carol")
        joined = time.monotonic()
        until(it.all_see_all, 90)
        seen = time.monotonic() - joined if it.all_see_all() else None
        time.sleep(max(0.0, 95 - (time.monotonic() - began)))
        said, _ = evil.communicate(timeout=120)
        return {
            **json.loads(said.strip().splitlines()[-1]),
            "all_see_all_s_after_newcomer_started": seen,
            "dials_to_bystander": len(dials),
            "alive": it.alive(),
            "refused": _refused(it),
        }


def eclipse(keys: int) -> Callable[[Path, Path], Row]:
    def run(folder: Path, checkout: Path) -> Row:
        with swarm(folder, checkout) as it:
            addresses = [target.address for target in it.targets.values()]
            command = [sys.executable, "-m", "benchmarks.attacks.dht", "eclipse", it.id, "95", str(keys), *addresses]
            evil = subprocess.Popen(command, **START)
            rounds = blind = 0
            while evil.poll() is None:
                time.sleep(2)
                rounds += 1
                blind += not it.all_see_all()
            assert evil.stdout is not None
            told = json.loads(evil.stdout.read().strip().splitlines()[-1])
            left = time.monotonic()
            at_the_end = it.all_see_all()
            healed = until(it.all_see_all, HEALED_S)
            return {
                **told,
                "seconds_blind": 2 * blind,
                "all_see_all_at_the_end": at_the_end,
                "healed_s_after": round(time.monotonic() - left) if healed else None,
                "alive": it.alive(),
                "refused": _refused(it),
            }

    return run


def admission(folder: Path, checkout: Path) -> Row:
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("admission.py"))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@contextmanager
def bystander() -> Any:
    """(port, dials): a listener on 127.0.0.1 that has nothing to do with the swarm, and when it was dialled."""
    dials: list[float] = []
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:

        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                dials.append(time.monotonic())
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield server.getsockname()[1], dials
        server.shutdown(socket.SHUT_RDWR)


def _gossip_address(it: Swarm) -> str:
    """Of the bootstrap: the gossip process says it on the node's card."""
    command = [sys.executable, "-m", "benchmarks.attacks.look", it.targets["boot"].address, it.id]
    done = subprocess.run(command, **START, timeout=60, check=True)
    return str(json.loads(done.stdout.strip().splitlines()[-1])["boot"])


def _refused(it: Swarm) -> dict[str, dict[str, float]]:
    """Node -> reason -> count, of those that refused something."""
    time.sleep(3)  # a status is written with each round
    counts = {name: target.refused() for name, target in it.targets.items() if target.lives}
    return {name: {reason: n for reason, n in reasons.items() if n} for name, reasons in counts.items()}


ATTACKS: dict[str, Callable[[Path, Path], Row]] = {
    "decoder": decoder,
    "link": link,
    "find": find,
    "providers": providers,
    "idle": places("idle"),
    "silent": places("silent"),
    "slow": slow,
    "flood": flood,
    "eclipse": eclipse(0),
    "eclipse with ground keys": eclipse(15),
    "admission": admission,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*ATTACKS, []])
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--label", default="now")
    args = parser.parse_args()
    mind_signals()
    path = RESULTS / "attacks.json"
    for name in args.names or ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            row = ATTACKS[name](Path(folder) / "swarm", args.checkout)
        print(f"== {name}: {json.dumps(row)}", flush=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        known.setdefault(args.label, {})[name] = {**row, "machine": machine()}
        write_row(path, known, indent=1)


if __name__ == "__main__":
    main()
