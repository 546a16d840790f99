"""Chooses the ports that a node listens on, and makes sure that no other program listens there.

    Port.take -> number -> p2pd or the gossip process listens there, seconds later -> Port.is_shared?
    claim of a number = the UDP port of that number, on loopback, bound by the node as long as it lives

A free port may be about to be taken: both programs set SO_REUSEPORT, so two of them can start on one port without an
error, and then share its connections. So parts of a node, and nodes of one machine, claim a port before they use it.

    ports.json = {"31330": 31332}        wanted -> got; 0 and -1 = any was wanted; others have the address written down
    the wanted port -> if it is taken, or any will do: the last port -> if that is taken: the next free one
    a default that the user did not choose -> the last port comes first: the default may belong to a node that is down
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.transports.settings import PORTS_TRIED, NetworkSettings, free_port, is_free, socket_at

ANY_PORT_TRIES = 20  # ports that the system may offer before the search ends
LISTENING = "0A"


class Port:
    """A TCP port of one part of a node: chosen by `take`, and from then on left alone by every other `Port` on this
    machine, until `release` or the end of this process."""

    def __init__(
        self,
        ip: str,
        wanted: int,
        last: int = 0,
        report: Callable[[str], None] = lambda sentence: None,
        named: bool = True,
    ) -> None:
        """Listen on `ip`. `wanted` may be 0 = any; unless `named`, it is only a default. `last` is the port of the last
        run, or 0. `report` is called if the port is not the wanted one."""
        self.number = 0  # the port that was taken; 0 before
        self._ip, self._wanted, self._named = ip, wanted, named
        self._last = last if 1024 <= last < 65536 else 0
        self._report = report
        self._claim: socket.socket | None = None

    def take(self) -> int:
        """The number to listen on now: the one held, unless somebody listens there. Raises LocalProtocolError if there
        is none, or `ip` is no address of this machine."""
        if self._claim is not None and is_free(self._ip, self.number):
            return self.number
        hoped, held = self.number or self._wanted, self._claim
        self.number, self._claim = self._choose()
        if held is not None:
            held.close()
        if hoped and self.number != hoped:
            as_before = ", as last time" if self.number == self._last else ""
            if as_before and not self._named and held is None:
                self._report(f"listening on port {self.number}, as last time")
            else:
                self._report(f"port {hoped} is taken: listening on {self.number}{as_before}")
        return self.number

    def is_shared(self) -> bool:
        """Whether another program listens on the port too, so that each gets some of the connections. Works only on
        systems with /proc."""
        family = "tcp6" if ":" in self._ip else "tcp"
        try:
            lines = Path(f"/proc/net/{family}").read_text().splitlines()[1:]
        except OSError:
            return False
        found = [fields[1] for line in lines if (fields := line.split())[3] == LISTENING]
        mine = [address for address in found if address.endswith(f":{self.number:04X}")]
        return len(mine) > len(set(mine))

    def release(self) -> None:
        """Let others have it."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _choose(self) -> tuple[int, socket.socket]:
        for number in self._candidates():
            if is_free(self._ip, number) and (claim := _claim(number)) is not None:
                return number, claim
        tried = f"ports {self._wanted} to {self._wanted + PORTS_TRIED - 1}" if self._wanted else "ports"
        raise LocalProtocolError(f"{tried} of {self._ip} are all taken: name another one")

    def _candidates(self) -> Iterator[int]:
        first = [self._wanted, self._last] if self._named else [self._last, self._wanted]
        yield from filter(None, first)
        if self._wanted:
            yield from range(self._wanted + 1, min(self._wanted + PORTS_TRIED, 65536))
        else:
            for _ in range(ANY_PORT_TRIES):
                yield free_port(self._ip, 0)


def _claim(number: int) -> socket.socket | None:
    """A socket that holds `number` until it is closed; None if another process holds it. Raises LocalProtocolError."""
    return socket_at("127.0.0.1", number, socket.SOCK_DGRAM)


def choose_ports(
    settings: NetworkSettings, file: Path | None, report: Callable[[str], None]
) -> tuple[Port | None, Port | None]:
    """Ports of the DHT and of gossip, taken, unless the node only dials; `file` may know those of last time. Raises
    LocalProtocolError if `settings.listen` is no address of this machine or a port is forbidden."""
    if settings.dial_only:
        return None, None
    got = {} if file is None else read_ports(file)
    last = got.get(settings.port, 0), got.get(settings.gossip_port or -1, 0)
    dht = Port(settings.listen, settings.port, last[0], report, "port" in settings.named_ports)
    gossip = Port(settings.listen, settings.gossip_port, last[1], report, "gossip_port" in settings.named_ports)
    try:
        dht.take()
        gossip.take()
    except LocalProtocolError:
        dht.release()
        raise
    return dht, gossip


def lost_port(listen: str, wanted: int, file: Path) -> int:
    """The port that was got last time, if somebody else has it now; else 0. Raises LocalProtocolError if `listen` is no
    address of this machine."""
    last = read_ports(file).get(wanted, 0)
    if not 1024 <= last < 65536:
        return 0
    claim = _claim(last) if is_free(listen, last) else None
    if claim is None:
        return last
    claim.close()
    return 0


def read_ports(file: Path) -> dict[int, int]:
    """Wanted -> got; empty if there is no such file, or a damaged one."""
    if not file.is_file():  # a pipe would wait for ever
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, int])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def note_ports(wanted: NetworkSettings, port: int, gossip_port: int, file: Path) -> None:
    """Write down the ports of this run. Raises OSError."""
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode({wanted.port: port, wanted.gossip_port or -1: gossip_port}))  # both may be 0
    new.replace(file)
