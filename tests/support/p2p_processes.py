"""The whole real transport as processes (p2p_node.py), which a test commands over their pipes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from swarm_protocol.identity import Identity
from tests.support.waiting import until

PROGRAM = Path(__file__).with_name("p2p_node.py")
QUICK = {"listen": "127.0.0.1", "port": 0, "gossip_port": 0, "relay": False}
PERIODS = {"card_ttl_s": 12.0, "card_renewal_s": 2.0, "lookup_s": 0.5}


class Node:
    """A node process and what it says."""

    def __init__(self, folder: Path, name: str, prefix: tuple[str, ...] = (), **settings: Any) -> None:
        self.name = name
        self.peer = Identity.load_or_create(folder / f"{name}.key").peer_id
        with (folder / f"{name}.err").open("w") as errors:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(PROGRAM), str(folder), name, json.dumps(QUICK | PERIODS | settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        assert self._answer() == "ready"

    def __call__(self, command: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    @property
    def members(self) -> set[str]:
        return set(self("status")["members"])

    def up(self) -> list[str]:
        """Its addresses, once it has any and its gossip runs."""
        return until(lambda: (status := self("status"))["gossip"] and status["addresses"])

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
