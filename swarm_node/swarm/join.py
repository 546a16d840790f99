"""Step into a swarm: manifest, identity, network, question files, tasks, the model's files; what `run` needs before it
loads a model.

The network is started first and comes up in the background, while files are gathered and the model is loaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from protocol.errors import LocalProtocolError, PeerUnreachable
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.transports.base import Transport
from swarm_node.config import NodeConfig
from swarm_node.errors import NobodyReached, UserError
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.base_weights.finding import choose_model
from swarm_node.swarm.links import Say, Swarm, keep, kept_manifest
from swarm_node.swarm.lookup import fetch_manifest
from swarm_node.swarm.manifests import task_tables
from swarm_node.swarm.network import open_transport, serve_swarm, visitor
from swarm_node.swarm.question_files import gather_files
from swarm_node.tasks import TaskSet, load_tasks


@dataclass(frozen=True)
class JoinedSwarm:
    """A swarm that this node is in."""

    manifest: Manifest
    identity: Identity
    transport: Transport
    tasks: TaskSet
    """All of the swarm's; those that the user chose are drawn from."""
    model: str | None = None
    """Where the swarm's model is, if that is to be trained; whoever joins gets it without naming it."""
    waited_s: float = 0.0
    """How long the manifest was waited for."""

    def with_model(self, config: NodeConfig) -> NodeConfig:
        """`config`, with that model."""
        if self.model is None:
            return config
        policy = config.policy.model_copy(update={"model": self.model, "revision": None})
        return config.model_copy(update={"policy": policy})

    @property
    def seed(self) -> int:
        """Root of randomness of a node that was given none: no two peers have the same."""
        return int.from_bytes(hashlib.sha256(self.identity.peer_id.encode()).digest()[:4], "big")


def join_swarm(
    swarm: Swarm,
    config: NodeConfig,
    run: RunDir,
    say: Callable[[str], None],
    stack: ExitStack,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> JoinedSwarm:
    """Enter `swarm` as it was found; `stack` gets what has to be closed. What may take long, and can be broken off
    anywhere, is done within `waiting()`. Raises UserError."""
    say_what_leaves(swarm, config, run, say)
    manifest, waited_s = swarm.manifest, 0.0
    if manifest is None:
        say(f"asking for the manifest of swarm {swarm.id[:16]}")
        began = time.monotonic()
        try:
            with waiting(), visitor(swarm, config.network, say) as visit:
                network_s = time.monotonic() - began
                left_s = None if config.minutes is None else max(0.0, 60 * config.minutes - network_s)
                manifest = fetch_manifest(visit, swarm, say, left_s)
        except PeerUnreachable as error:  # only with `minutes`: without, it waits on
            ends = "1 minute is" if config.minutes == 1 else f"{config.minutes:g} minutes are"
            raise NobodyReached(f"{ends} over before training began: {error}") from error
        waited_s = time.monotonic() - began
    keep(manifest, run, swarm.named)
    try:
        with os_errors_explained(run.identity):
            identity = Identity.load_or_create(run.identity)
    except LocalProtocolError as error:
        raise UserError(str(error)) from error
    transport = open_transport(config.network, manifest, swarm.peers, run, say)
    stack.callback(transport.close)
    chosen = config.tasks if "tasks" in config.model_fields_set else []
    with waiting():
        files = gather_files(manifest, swarm, run, chosen, say, lambda: transport)
    serve_swarm(transport, manifest, files)
    tables = task_tables(manifest, files)
    if not tables:
        raise UserError(f"none of the question files of {manifest.name} could be had: give one with --tasks file.jsonl")
    tasks = load_tasks(tables, config.rewards)
    if chosen:
        tasks = tasks.only(chosen)
    say(f"swarm {manifest.name} {manifest.swarm_id[:16]}, this is peer {identity.peer_id}")
    with waiting():
        model = choose_model(config, manifest, [*swarm.peers, *manifest.bootstrap], transport, say)
    return JoinedSwarm(manifest, identity, transport, tasks, model, waited_s)


def say_what_leaves(swarm: Swarm, config: NodeConfig, run: RunDir, say: Say, trains: bool = True) -> None:
    """What leaves this machine and what comes, before it does; once for each swarm and run directory, where the
    manifest is kept when it begins. Nothing is said of a swarm that was made here for processes of this machine."""
    if not swarm.named and config.network.listen == "127.0.0.1":
        return
    kept = kept_manifest(run)
    if kept is not None and kept.swarm_id == swarm.id:
        return
    if trains:
        public = "the IP address of this machine and all text that its model generates become public"
        weights = ", and the weights it trains" if config.averaging.method != "none" or config.pipeline.stages else ""
        besides = f"so do its name and speed and the kind of its model{weights}"
        taken = f"stored in {run.path}, but never run"
    else:
        public, besides = "the IP address of this machine becomes public", "so does its name"
        taken = "passed on"
    if config.sharing.give_model and (swarm.manifest is None or swarm.manifest.model is not None):
        if_any = "" if swarm.manifest else ", if it has one,"
        besides += (
            f"; the files of the model that the swarm begins with{if_any} are given to members (sharing.give_model)"
        )
    relaying = "on (--relay)" if config.network.serve_relay else "off (--relay switches it on)"
    say(
        f"first time in this swarm: {public} to everybody in it; {besides}; text of strangers is {taken}; relaying "
        f"others' connections is {relaying}"
    )
