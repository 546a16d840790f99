"""A finding of `swarm-node doctor`, and the command that starts the node, for its remedies."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Literal

import msgspec

from swarm_node.swarm.links import join_link, living
from swarm_protocol.manifest import LINK_SCHEME
from swarm_protocol.messages import PeerCard
from swarm_protocol.peers import is_relayed


class Check(msgspec.Struct, frozen=True):
    """One finding."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""  # the command that fixes it, if there is one


class StartCommand(msgspec.Struct, frozen=True):
    """The command that starts this node. Parts that are not known are words in capitals."""

    verb: Literal["join", "bootstrap", "local"] = "join"
    swarm: str = ""  # a manifest's path or address, or a link, as the user named it
    run_dir: str = ""

    def having(self, options: str = "", elsewhere: bool = False) -> str:
        """The command with more `options`, and with another run directory if `elsewhere`."""
        named = [] if self.verb == "local" else [shlex.quote(self.swarm) if self.swarm else "SWARM"]
        place = ["--run-dir", "DIR" if elsewhere else shlex.quote(self.run_dir)] if elsewhere or self.run_dir else []
        return " ".join(["swarm-node", self.verb, *named, *place, *([options] if options else [])])

    def reaching(self, members: Mapping[str, PeerCard]) -> str:
        """The command with peers to connect to: reachable ones of `members`, else a new bootstrap peer."""
        swarm = next((card.swarm for card in members.values()), "")
        others = [address for address in living(members, []) if not is_relayed(address)]
        if swarm and others:
            return msgspec.structs.replace(self, swarm=join_link(swarm, [], others)).having()
        if self.verb == "bootstrap":
            return self.having()
        if self.swarm.startswith(f"{LINK_SCHEME}:"):
            asked = msgspec.structs.replace(self, swarm="LINK").having()
            return f"{asked}  # LINK: ask for a new one, where this one came from"
        return f"swarm-node bootstrap {shlex.quote(self.swarm) if self.swarm else 'MANIFEST'}"


UNKNOWN_START = StartCommand()
