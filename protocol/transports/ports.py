"""Ports that a node got instead of those it wanted, remembered from run to run: others have its address written down.

ports.json = {"31330": 31332}        wanted -> got; 0 = any was wanted
the wanted port -> if it is taken, or any will do: the one got last time -> if that is taken: the next free one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from protocol.transports.settings import NetworkSettings, is_free


def recall_ports(settings: NetworkSettings, file: Path, report: Callable[[str], None]) -> NetworkSettings:
    """`settings` with the ports that were got last time in place of those that are taken by now, and `report` told so;
    unchanged if there is no such file, or a damaged one. Raises LocalProtocolError if `settings.listen` is no address
    of this machine or a port is forbidden."""
    if settings.dial_only:
        return settings
    got = read_ports(file)

    def choose(wanted: int, key: int) -> int:
        last = got.get(key, 0)
        if wanted and is_free(settings.listen, wanted):
            return wanted
        if not 1024 <= last < 65536 or not is_free(settings.listen, last):
            return wanted
        if wanted:
            report(f"port {wanted} is taken: listening on {last}, as last time")
        return last

    return replace(
        settings,
        port=choose(settings.port, settings.port),
        gossip_port=choose(settings.gossip_port, settings.gossip_port or -1),
    )


def read_ports(file: Path) -> dict[int, int]:
    """Wanted -> got; empty if there is no such file, or a damaged one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, int])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def note_ports(wanted: NetworkSettings, port: int, gossip_port: int, file: Path) -> None:
    """Write down what was got. Raises OSError."""
    keys = wanted.port, wanted.gossip_port or -1  # both may be 0
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(dict(zip(keys, (port, gossip_port), strict=True))))
    new.replace(file)
