"""Where others join: a member without a model, `swarm-node bootstrap`.

    manifest -> network on all gossip shards, manifest and question files for who asks -> the link on stdout

Everything else that it says goes to stderr, so that `swarm-node bootstrap swarm.toml | head -1` is the link.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from protocol.manifest import Manifest
from protocol.messages import PROTOCOL_VERSION, PeerCard
from protocol.topics import rollout_topic
from protocol.transports.base import Transport
from swarm_node.config import NodeConfig, dump_toml
from swarm_node.joining import (
    fetch_manifest,
    find_swarm,
    gather_files,
    join_link,
    keep,
    open_transport,
    serve_swarm,
    visitor,
)
from swarm_node.manifests import task_tables
from swarm_node.observability.metrics import EventLog
from swarm_node.rundir import RunDir
from swarm_node.stopping import Stopper, StopRequested

LOOK_S = 0.5
STATUS_S = 2.0
"""Between two writings of swarm.json."""
LINE_S = 60.0
"""Between two lines about how it goes; one comes at once when members come or go."""


def run_bootstrap(config: NodeConfig) -> int:
    """Be there until a signal comes; returns the exit code. Raises UserError."""
    name = config.name or "bootstrap"
    config = config.model_copy(update={"name": name, "run_dir": config.run_dir or f"runs/{name}"})
    if "serve_relay" not in config.network.model_fields_set:
        config = config.model_copy(update={"network": config.network.model_copy(update={"serve_relay": True})})
    with ExitStack() as stack:
        run = stack.enter_context(RunDir.open(config.directory))
        events = stack.enter_context(EventLog(run.events, _say))

        def say(sentence: str) -> None:
            _say(sentence)
            events.write("note", sentence)

        run.write_config(dump_toml(config))
        stop = stack.enter_context(Stopper(last_resort=lambda: None))
        try:
            stop.allow()
            manifest, transport = _enter(config, run, say, stack)
            _Lookout(config, manifest, transport, run, say).watch()
        except StopRequested:
            say("leaving")
    return 0


def _enter(config: NodeConfig, run: RunDir, say: Any, stack: ExitStack) -> tuple[Manifest, Transport]:
    raise NotImplementedError


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
