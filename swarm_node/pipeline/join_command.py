"""The command that brings another machine into a crew, and when people are told it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from swarm_node.config import NodeConfig
from swarm_node.swarm.join import JoinedSwarm
from swarm_node.swarm.links import join_link, kind_of_link, living
from swarm_protocol.crew import Plan
from swarm_protocol.messages import PeerCard


class JoinCommand:
    """The command, renewed on one thread and told on another."""

    def __init__(self, entered: JoinedSwarm, config: NodeConfig) -> None:
        self.entered = entered
        self.link = ""  # the join link; empty = there is none yet
        self.open = True  # other machines may join
        pipeline, model = config.pipeline, config.policy.model
        named = [] if model in ("starter", entered.model) else ["--model", model]
        self._options = shlex.join(["--stages", str(pipeline.stages), "--crew", pipeline.crew, *named])
        self._bootstrap = [*config.network.bootstrap, *entered.manifest.bootstrap]
        self._now: tuple[Sequence[str], bool, str] = (), False, ""
        """This node's addresses in the link, whether the link can name all peers of the crew, and the link, now ..."""
        self._told: tuple[Sequence[str], bool, str] = self._now  # ... and when it was last told.

    def renew(self, addresses: Sequence[str], members: Mapping[str, PeerCard], plan: Plan | None) -> None:
        """Make the link of this node's addresses, if it has any, and of some present members."""
        if not addresses:
            return
        crew = [] if plan is None else [*(seat.peer for seat in plan.assignments), *plan.spares]
        others = set(crew) - {self.entered.transport.peer_id}
        known = all(peer in members and members[peer].addresses for peer in others)
        self.link = join_link(self.entered.manifest.swarm_id, addresses, [*living(members, crew), *self._bootstrap])
        self._now = addresses, known, self.link

    def tell(self, formed: bool, say: Callable[..., None]) -> None:
        """Say what to type elsewhere: once, and again when this node's addresses have changed.

        Also when the crew has been whole (`formed`) and the link names its other peers as well."""
        addresses, all_known, link = self._now
        told_addresses, named, told = self._told
        more = addresses == told_addresses and formed and all_known and not named
        if not self.open or not link or (addresses == told_addresses and not more):
            return
        self._told = addresses, formed and all_known, link
        if link != told:
            where = "in another terminal" if kind_of_link(link) == "own" else "on another machine"
            say("from now on this does as well, which names several peers:" if more else f"{where}:")
            say(f"swarm-node join '{link}' {self._options}", "link")
