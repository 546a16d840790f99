"""Look at a swarm from outside, again and again, and write what is seen to a directory that the dashboard reads.

link | manifest -> visitor -> cards of members, every LOOK_S -> swarm.json of the directory
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from swarm_node.config import NetworkConfig
from swarm_node.errors import UserError
from swarm_node.say import Once, Say, Warned
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.declared import kinds_of
from swarm_node.swarm.links import MAX_NAMED, Swarm, find_swarm, join_link
from swarm_node.swarm.lookup import fetch_manifest
from swarm_node.swarm.network import visitor
from swarm_node.swarm.page import History, page_directory, page_of, page_status
from swarm_protocol.errors import PeerUnreachable, ProtocolError

LOOK_S = 3.0  # time between two looks at the members
MANIFEST_WAIT_S = 5.0  # how long one try to get the manifest may take: only names and kinds of task wait for it
AGAIN_S = 20.0  # time until the next try after the network did not start
NO_NETWORK = "the swarm cannot be looked at now, and is tried again"


@contextmanager
def looked_at(named: str, network: NetworkConfig, folder: Path, say: Say) -> Iterator[Path]:
    """Within the context, a thread looks at the swarm that a link, a path or an address names and writes its page.
    Yields the directory of the page, below `folder`. Raises UserError if nothing there can be asked."""
    swarm = find_swarm(named)
    if not (swarm.peers or network.bootstrap):
        raise UserError(f"{named} has no address to ask: use a link that `swarm-node bootstrap` or a member prints")
    name = swarm.manifest.name if swarm.manifest else swarm.id[:16]
    with RunDir.open(page_directory(folder, name)) as run:
        run.write_status(page_status(swarm.id, name, None))
        looker = Looker(swarm, network, run, say)
        thread = threading.Thread(target=looker.run, name="looking", daemon=True)
        thread.start()
        try:
            yield run.path
        finally:
            looker.ended.set()
            thread.join()


class Looker:
    """Looks at one swarm until `ended` is set."""

    def __init__(self, swarm: Swarm, network: NetworkConfig, run: RunDir, say: Say) -> None:
        self.ended = threading.Event()
        self._history = History()
        self._swarm, self._network, self._run, self._say = swarm, network, run, say

    def run(self) -> None:
        """Look until the end. A network that cannot start is said on the page, and tried again. The error itself, which
        may name paths and addresses of this machine, is said to its user alone: strangers read the page."""
        once = Once(self._say)
        while not self.ended.is_set():
            try:
                self._look()
            except (UserError, ProtocolError) as error:
                once(str(error), Warned(f"the swarm cannot be looked at, and is tried again: {error}"))
                self._write(None, NO_NETWORK)
                self.ended.wait(AGAIN_S)

    def _look(self) -> None:
        with visitor(self._swarm, self._network, self._say) as transport:
            while not self.ended.wait(LOOK_S):
                members = transport.members()
                if members and self._swarm.manifest is None:
                    try:
                        manifest = fetch_manifest(transport, self._swarm, lambda line: None, MANIFEST_WAIT_S)
                    except PeerUnreachable:
                        continue
                    self._swarm = msgspec.structs.replace(self._swarm, manifest=manifest)
                kinds = None if self._swarm.manifest is None else kinds_of(self._swarm.manifest)
                nobody = "" if members else f"nobody was found yet at {', '.join(self._swarm.peers[:MAX_NAMED])}"
                history = self._history.add(time.time(), members, kinds)
                self._write(page_of(members, self._link(), kinds) | {"history": history}, nobody)

    def _write(self, page: dict[str, object] | None, problem: str) -> None:
        manifest = self._swarm.manifest
        name = manifest.name if manifest else self._swarm.id[:16]
        self._run.write_status(page_status(self._swarm.id, name, page, problem))

    def _link(self) -> str:
        """The link with the addresses that were given, and no others."""
        return join_link(self._swarm.id, self._swarm.peers, self._network.bootstrap)
