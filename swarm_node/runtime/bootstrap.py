"""A bootstrap peer, `swarm-node bootstrap`: a member without a model, through which others join.

    manifest -> network on all gossip shards; serve manifest and question files -> the link on stdout

Everything else goes to stderr, so `swarm-node bootstrap swarm.toml | head -1` prints the link.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import msgspec

from swarm_node.config import NetworkConfig, NodeConfig
from swarm_node.config.own import dump_own
from swarm_node.errors import StopRequested, TemporaryError, UserError
from swarm_node.install import outdated
from swarm_node.observability.health import Health
from swarm_node.observability.lines import LEVELS, shown_as_lines
from swarm_node.observability.refusals import refusal_rows, say_first_refusals
from swarm_node.observability.wrapping import for_stream
from swarm_node.runtime.console import open_health, open_log, say
from swarm_node.runtime.limits import MemoryLimit
from swarm_node.runtime.pause import refuse_on_a_bootstrap
from swarm_node.runtime.preemption import stopper
from swarm_node.runtime.preflight import check_run_place, port_holder
from swarm_node.runtime.shutdown import Stopper, leaving_at_once
from swarm_node.runtime.status import STATUS_S
from swarm_node.runtime.stop_request import stopping_when_asked
from swarm_node.say import Once, Warned, is_shown, level_of
from swarm_node.storage.rundir import BOOTSTRAP, RunDir
from swarm_node.swarm.base_weights.finding import give_what_is_here
from swarm_node.swarm.clock import say_clock
from swarm_node.swarm.declared import kinds_of
from swarm_node.swarm.introduction import say_what_leaves
from swarm_node.swarm.links import Swarm, find_swarm, join_link, keep, reach_of
from swarm_node.swarm.lookup import fetch_manifest
from swarm_node.swarm.network import open_transport, serve_swarm, visitor
from swarm_node.swarm.page import History, page_directory, page_of, page_status
from swarm_node.swarm.question_files import gather_files, names_of_files
from swarm_node.swarm.twins import check_twins
from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.gossip_kinds import KINDS
from swarm_protocol.manifest import Manifest
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.transports.base import Transport
from swarm_protocol.transports.ports import lost_port

MEMBERS_CHECK_S = 0.5
NO_ADDRESS_S = 30.0  # a bootstrap that had no address for so long is unhealthy: nobody can join through it
TRAFFIC_LINE_S = 600.0  # time between two lines about its state; one comes at once when a member comes or goes


Beside = Callable[[Path], AbstractContextManager[None]]
"""Shows, within its context, the pages that lie in a directory."""


def run_bootstrap(config: NodeConfig, beside: Beside | None = None) -> int:
    """Run a bootstrap until a signal comes; returns the exit code. With `beside` it writes a page of the swarm, which
    that shows. Raises UserError."""
    name = config.name or "bootstrap"
    config = config.model_copy(update={"name": name, "run_dir": config.run_dir or f"runs/{name}"})
    lines = shown_as_lines(config.log_format, name, sys.stderr)

    def early(text: str) -> None:
        if is_shown(level_of(text)):
            _tell(text) if lines is None else lines(text, "start", LEVELS[level_of(text)])

    swarm = find_swarm(config.swarm, RunDir(config.directory), early)  # first: a mistake in it leaves nothing behind
    if RunDir(config.directory).has_trained:
        raise UserError(f"{config.directory} is a run that trains, whose settings are kept: choose another --run-dir")
    check_run_place(config, network=True)
    early("starting (loading the network) …")
    with ExitStack() as stack:
        run = RunDir(config.directory)
        stack.enter_context(leaving_at_once(run.abandon))
        stack.enter_context(run.take())
        stack.callback(run.undo)  # a start that nobody could dial by then leaves nothing
        open_log(run, lines or (lambda text, kind, level: None if level == "error" else _tell(text)), stack)
        refuse_on_a_bootstrap(config, run)
        say_what_leaves(swarm, config, run, say, trains=False)
        health = Health(what="look", least_s=NO_ADDRESS_S, done=_seen)
        open_health(config, health, run, stack)
        health.identify(name, swarm.id, "bootstrap")
        stop = stack.enter_context(stopper(config.spot, run.undo, say, health.measures, advice=""))
        stack.enter_context(stopping_when_asked(run, stop, say))
        try:
            _load_network(stop)
            manifest, transport = _enter(swarm, config, run, stop, stack)
            health.restarted = transport.restarted
            page = None
            if beside is not None:
                pages = run.path / "page"
                page = stack.enter_context(RunDir.open(page_directory(pages, manifest.name)))
                page.write_status(page_status(manifest.swarm_id, manifest.name, None))
                stack.enter_context(beside(pages))
            _watch(config, manifest, transport, run, health, page)
        except StopRequested:
            health.leaving = True
            say("leaving", "stop")
    return 0


def _tell(sentence: str) -> None:
    """Write a sentence to stderr, broken between words on a terminal."""
    _print("\n".join(for_stream(line, sys.stderr) for line in sentence.split("\n")))


def _print(sentence: str, stream: TextIO | None = None) -> None:
    """Write a line to stderr or another stream; a stream that nobody reads any more (`| head -1`) goes nowhere then.

    The line and its end are one write: `print` makes two if Python does not buffer, and the output of `tee` on the same
    terminal would come in between.
    """
    stream = stream or sys.stderr
    try:
        stream.write(f"{sentence}\n")
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _load_network(stop: Stopper) -> None:
    """Import the network, which takes seconds, and only then let a signal that came meanwhile end the start: it would
    break the import at any point. Nothing has been written by then."""
    stop.hold()
    import swarm_protocol.transports.p2p.transport  # noqa: F401

    stop.allow()


def _enter(
    swarm: Swarm, config: NodeConfig, run: RunDir, stop: Stopper, stack: ExitStack
) -> tuple[Manifest, Transport]:
    """Join the swarm on all topics, and serve its manifest and question files, without loading a task."""
    manifest = swarm.manifest
    if manifest is None:
        with visitor(swarm, config.network, say) as visit:
            manifest = fetch_manifest(visit, swarm, say)
    stop.hold()
    keep(manifest, run, swarm.named)
    run.write("config.toml", dump_own(config, config))
    run.write_status(_named(config, manifest))  # so that `resume` knows a bootstrap, however early this start ends
    _say_lost_port(config.network, run)
    transport = open_transport(config.network, manifest, swarm.peers, run, say)
    stack.callback(transport.close)
    stop.allow()
    for topic in (topic for kind in KINDS for topic in kind.topics(manifest.swarm_id, manifest.shards)):
        transport.subscribe(topic, lambda data: None)
    transport.announce(
        PeerCard(
            protocol=PROTOCOL_VERSION,
            swarm=manifest.swarm_id,
            created=time.time(),
            name=config.name or "bootstrap",
            roles=["bootstrap", "relay"] if config.network.serve_relay else ["bootstrap"],
        )
    )
    files: dict[str, Path] = {}
    serve_swarm(transport, manifest, files)  # answers at once, with the files as they come
    say(f"swarm {manifest.name} {manifest.swarm_id[:16]}, this is peer {transport.peer_id}")
    own = config.tasks if "tasks" in config.model_fields_set else []
    give_what_is_here(config, manifest, transport, say, asked=True)
    files |= gather_files(manifest, swarm, run, own, say, transport)
    if files:
        names = names_of_files(manifest)
        say(f"giving the swarm's questions to members that lack them: {', '.join(names[each] for each in files)}")
    return manifest, transport


def _say_lost_port(network: NetworkConfig, run: RunDir) -> None:
    """Say that the port of the last start is taken: links that were handed out name it."""
    if network.dial_only:
        return
    try:
        lost = lost_port(network.listen, network.port, run.ports)
    except LocalProtocolError as error:
        raise UserError(str(error)) from error
    if lost:
        taken = f"port {lost}, where this bootstrap was last time, is taken{port_holder(lost)}"
        remedy = f"free it, then start this again with --port {lost}"
        say(Warned(f"{taken}: links handed out before lead nowhere until it has it back ({remedy})"))


def _watch(
    config: NodeConfig, manifest: Manifest, transport: Transport, run: RunDir, health: Health, page: RunDir | None
) -> None:
    """Print the link and say who is there, until StopRequested. Raises UserError for too much memory."""
    link, there, line_at, status_at, looks = "", -1, 0.0, 0.0, 0
    others = [*config.network.bootstrap, *manifest.bootstrap]
    once, of_links, kinds, history = Once(say), Once(partial(say, kind="link")), kinds_of(manifest), History()
    memory = MemoryLimit(config.resources.max_memory_gb, "lower network.max_connections")
    while True:
        now, addresses = time.monotonic(), transport.addresses
        if addresses or config.network.dial_only:
            run.keep()  # others may know it from here on
        if addresses and (newest := join_link(manifest.swarm_id, addresses, others)) != link:
            link = newest
            _print(link, sys.stdout)
            if config.log_format == "json":
                say(link, "join")
            if reach := reach_of(link):
                of_links("reach", reach)
        with suppress(OSError):  # too many open files: it is looked at again
            if exceeded := memory.exceeded():
                raise TemporaryError(f"the bootstrap took {exceeded}")
        check_twins(transport.twins(), transport.peer_id, once)
        say_clock(transport, once)
        status = _status(config, manifest, transport)
        traffic, here = status["traffic"], len(status["peers"])
        if traffic.get("rejected/newer"):
            once("newer", Warned(outdated(transport.too_new() or "a peer")))
        reasons = [name.removeprefix("rejected/") for name, n in traffic.items() if n and "rejected/" in name]
        say_first_refusals(once, reasons, transport.refusals())
        if addresses:
            looks += 1
            trainers = sum("trainer" in card.roles for card in transport.members().values())
            company = {"swarm/peers": here, "swarm/trainers": trainers}
            health.write(looks, company | {f"swarm/{name}": value for name, value in traffic.items()})
        if addresses and (here != there or now - line_at > TRAFFIC_LINE_S):
            there, line_at = here, now
            volume = f"{traffic['bytes_in'] / 1e6:.1f} MB in, {traffic['bytes_out'] / 1e6:.1f} MB out"
            others_here = "1 other member" if there == 1 else f"{there} other members"
            say(f"{others_here}; {volume}, {traffic['messages_in']:.0f} messages passed on")
        if now - status_at > STATUS_S:
            status_at = now
            run.write_status(status | {"link": link})
            if page is not None and addresses:
                members = transport.members()
                seen = page_of(members, link, kinds) | {"history": history.add(time.time(), members, kinds)}
                page.write_status(page_status(manifest.swarm_id, manifest.name, seen))
        time.sleep(MEMBERS_CHECK_S)


def _seen(numbers: Mapping[str, float]) -> str:
    """What /healthz says of a look: `2 members seen, checked`."""
    members = int(numbers["swarm/peers"])
    return f"{members} {'member' if members == 1 else 'members'} seen, checked"


def _status(config: NodeConfig, manifest: Manifest, transport: Transport) -> dict[str, Any]:
    """The content of swarm.json, as `Member.status` gives it, for a member that trains nothing."""
    members = transport.members()
    names = {peer: card.name for peer, card in members.items()}
    return _named(config, manifest) | {
        "peer": transport.peer_id,
        "addresses": transport.addresses,
        "traffic": dict(transport.stats()),
        "restarted": dict(transport.restarted()),
        "refused": msgspec.to_builtins(refusal_rows(transport.refusals(), {}, names)),
        "peers": {
            peer: {"name": card.name, "present": True, "policy_version": card.policy_version}
            for peer, card in sorted(members.items())
        },
    }


def _named(config: NodeConfig, manifest: Manifest) -> dict[str, Any]:
    """The part of swarm.json that is known before the network is up."""
    return {
        "role": BOOTSTRAP,
        "swarm": manifest.swarm_id,
        "swarm_name": manifest.name,
        "time": time.time(),
        "name": config.name,
        "peers": {},
    }
