"""The line that brings another machine into a crew, and when people are told it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from protocol.crew import Plan
from protocol.messages import PeerCard
from swarm_node.config import NodeConfig
from swarm_node.swarm.links import join_link, living


class JoinCommand:
    """`link` is made anew on one thread, told on another."""

    def __init__(
        self, me: str, swarm: str, config: NodeConfig, bootstrap: Sequence[str], swarms_model: str | None = None
    ) -> None:
        """`bootstrap`: addresses that this node began with; `swarms_model`: a model that others get unnamed."""
        self.me = me
        self.swarm = swarm
        self.bootstrap = bootstrap
        self.link = ""
        """Others join with it, if there is any."""
        self.open = True
        """Others may come from elsewhere."""
        pipeline, model = config.pipeline, config.policy.model
        named = [] if model in ("starter", swarms_model) else ["--model", model]
        self._options = shlex.join(["--stages", str(pipeline.stages), "--crew", pipeline.crew, *named])
        self._now: tuple[Sequence[str], bool, str] = (), False, ""
        """This node's addresses in the link, whether all of the crew can be named in it, and the link; ..."""
        self._told: tuple[Sequence[str], bool, str] = self._now
        """... as they were when it was last told."""

    def renew(self, addresses: Sequence[str], members: Mapping[str, PeerCard], plan: Plan | None) -> None:
        """With this node's addresses, if it has any, and some of the members that are there."""
        if not addresses:
            return
        crew = [] if plan is None else [*(seat.peer for seat in plan.assignments), *plan.spares]
        known = all(peer in members and members[peer].addresses for peer in set(crew) - {self.me})
        self.link = join_link(self.swarm, addresses, [*living(members, crew), *self.bootstrap])
        self._now = addresses, known, self.link

    def tell(self, formed: bool, say: Callable[..., None]) -> None:
        """Say what to type on another machine: once, again if this node's addresses have changed, and when the crew
        has been whole (`formed`) and the link names others of it as well."""
        addresses, all_known, link = self._now
        told_addresses, named, told = self._told
        more = addresses == told_addresses and formed and all_known and not named
        if not self.open or not link or (addresses == told_addresses and not more):
            return
        self._told = addresses, formed and all_known, link
        if link != told:
            say("from now on this does as well, which names several peers:" if more else "on another machine:")
            say(f"swarm-node join '{link}' {self._options}", "link")
