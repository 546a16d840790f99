"""Join a swarm: all that a node needs of it before it loads a model.

manifest -> identity -> transport -> question files -> tasks -> the swarm's model on disk

The transport connects in the background, while files are gathered.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from swarm_node.config import NodeConfig
from swarm_node.errors import NobodyReached, UserError
from swarm_node.say import Say
from swarm_node.storage.cgroups import free_main_memory
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.base_weights.finding import choose_model
from swarm_node.swarm.introduction import DECIDE_S, say_what_for, say_what_leaves
from swarm_node.swarm.links import Swarm, keep
from swarm_node.swarm.lookup import fetch_manifest, first_members
from swarm_node.swarm.manifests import task_tables
from swarm_node.swarm.network import arriving, identity_file, open_transport, serve_swarm, visitor
from swarm_node.swarm.question_files import gather_files
from swarm_node.tasks.one_turn import in_form
from swarm_node.tasks.taskset import TaskSet, load_tasks
from swarm_protocol.errors import LocalProtocolError, PeerUnreachable
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import Manifest
from swarm_protocol.messages import PeerCard
from swarm_protocol.transports.base import Transport


@dataclass(frozen=True)
class JoinedSwarm:
    manifest: Manifest
    identity: Identity
    transport: Transport
    tasks: TaskSet  # all tasks of the swarm; if the user chose some, only those are drawn
    model: str | None = None
    """Where the swarm's model is, as `policy.model` takes it; `None` if it has none or the user trains another."""
    waited_s: float = 0.0  # how long members took to give the manifest

    def of_a_member(self, config: NodeConfig) -> NodeConfig:
        """`config` with the swarm's form of answers, and with its model if there is one."""
        config = in_form(config, self.manifest.answer)
        if self.model is None:
            return config
        policy = config.policy.model_copy(update={"model": self.model, "revision": None})
        return config.model_copy(update={"policy": policy})

    @property
    def seed(self) -> int:
        """The random seed of a node whose user chose none: the first 32 bits of sha256 of its peer id."""
        return int.from_bytes(hashlib.sha256(self.identity.peer_id.encode()).digest()[:4], "big")


def join_swarm(
    swarm: Swarm,
    config: NodeConfig,
    run: RunDir,
    say: Say,
    stack: ExitStack,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> JoinedSwarm:
    """Join `swarm`; `stack` closes the transport. Steps that may take long, and can be interrupted anywhere, run within
    `waiting()`. Raises UserError; NobodyReached if `config.minutes` are over before a member gives the manifest."""
    is_new = say_what_leaves(swarm, config, run, say)
    if is_new and all(map(_is_terminal, (sys.stdin, sys.stdout))):
        with waiting():
            time.sleep(DECIDE_S)
    manifest, waited_s = swarm.manifest, 0.0
    met: dict[str, PeerCard] = {}
    if manifest is None:
        say(f"asking for the manifest of swarm {swarm.id[:16]}")
        began = time.monotonic()
        try:
            with waiting(), visitor(swarm, config.network, say) as visit:
                network_s = time.monotonic() - began
                left_s = None if config.minutes is None else max(0.0, 60 * config.minutes - network_s)
                manifest = fetch_manifest(visit, swarm, say, left_s, met)
                met |= first_members(visit)
        except PeerUnreachable as error:  # only with `minutes`: without, it waits on
            ends = "1 minute is" if config.minutes == 1 else f"{config.minutes:g} minutes are"
            raise NobodyReached(f"{ends} over before training began: {error}") from error
        waited_s = time.monotonic() - began
    keep(manifest, run, swarm.named)
    try:
        key = identity_file(config.network, run)
        with os_errors_explained(key):
            identity = Identity.load_or_create(key)
    except LocalProtocolError as error:
        raise UserError(str(error)) from error
    transport = open_transport(config.network, manifest, swarm.peers, run, say)
    stack.callback(transport.close)
    transport.meet(met)
    files: dict[str, Path] = {}
    serve_swarm(transport, manifest, files)  # answers at once, with the files as they come
    transport.announce(arriving(config, manifest.swarm_id))
    chosen = config.tasks if "tasks" in config.model_fields_set else []
    with waiting():
        files |= gather_files(manifest, swarm, run, chosen, say, transport)
    tables = task_tables(manifest, files)
    if not tables:
        raise UserError(f"no question file of {manifest.name} was found: name one with --tasks file.jsonl")
    tasks = load_tasks(tables, in_form(config, manifest.answer).rewards)
    if chosen:
        tasks = tasks.only(chosen)
    say(f"swarm {manifest.name} {manifest.swarm_id[:16]}, this is peer {identity.peer_id}")
    if is_new:
        say_what_for(manifest, tasks, config, say, memory_for_a_model)
    with waiting():
        model = choose_model(config, manifest, [*swarm.peers, *manifest.bootstrap], transport, say)
    return JoinedSwarm(manifest, identity, transport, tasks, model, waited_s)


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody may read or type there."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def memory_for_a_model() -> tuple[int, bool]:
    """(free bytes, whether they are a GPU's) for a model; 0 = not known."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0]), True
    return free_main_memory(), False
