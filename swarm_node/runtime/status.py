"""swarm.json, which `swarm-node status` shows of a run in a swarm, written every two seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from swarm_node.config import NetworkConfig
from swarm_node.runtime.console import say
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.links import join_link
from swarm_node.swarm.page import summary_of

if TYPE_CHECKING:  # alone, a run loads nothing of the network
    from swarm_node.pipeline.crew import CrewNode
    from swarm_node.swarm.member import Member

STATUS_S = 2.0  # time between two writings of swarm.json


@contextmanager
def status_written(
    run: RunDir, member: Member, network: NetworkConfig, paused: Callable[[], str], crew: CrewNode | None
) -> Iterator[None]:
    """Within the context, and a last time if it ends without an error, write swarm.json, and say the join link whenever
    it changes.

    A thread does it, since a round may take long. `paused` returns why the node is paused; `crew` is the one that this
    node leads, whose own join command is said instead.
    """
    with suppress(msgspec.ValidationError):  # by another version
        member.uses.load(run.read_uses())  # what members said until the start before ended
    ended = threading.Event()
    others = [*network.bootstrap, *member.manifest.bootstrap]

    def write() -> str:
        """Write swarm.json. Returns the link by which others join; empty if there is none yet."""
        status = member.status() | {"paused": paused()}
        if crew is not None:
            run.write_status(status | {"link": crew.parts.join_command.link, "crew": crew.status()})
            return ""
        link = join_link(status["swarm"], status["addresses"], others)
        mine = {} if member.card is None else {member.peer_id: member.card}
        page = summary_of({**member.transport.members(), **mine}, link, member.kinds)
        run.write_status(status | {"link": link, "crew": None, "page": page})
        return link if status["addresses"] else ""

    def watch() -> None:
        told = ""
        while not ended.wait(STATUS_S):
            link = write()
            if crew is not None:
                crew.invite()
            elif link not in ("", told):
                told = link
                say("others join with:", "join")
                say(link, "join")

    thread = threading.Thread(target=watch, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    write()
