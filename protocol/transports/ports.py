"""Ports that a node got instead of those it wanted, remembered from run to run: others have its address written down.

    ports.json = {"31330": 31332}        wanted -> got; 0 = any was wanted
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from protocol.transports.settings import NetworkSettings


def recall_ports(settings: NetworkSettings, file: Path) -> NetworkSettings:
    """`settings` with the ports that were got last time; unchanged if there is no such file, or a damaged one."""
    try:
        got = msgspec.json.decode(file.read_bytes(), type=dict[int, int])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return settings
    known = {wanted: port for wanted, port in got.items() if 0 < port < 65536}
    return replace(
        settings,
        port=known.get(settings.port, settings.port),
        gossip_port=known.get(settings.gossip_port or -1, settings.gossip_port),
    )


def note_ports(wanted: NetworkSettings, port: int, gossip_port: int, file: Path) -> None:
    """Write down what was got. Raises OSError."""
    keys = wanted.port, wanted.gossip_port or -1  # both may be 0
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(dict(zip(keys, (port, gossip_port), strict=True))))
    new.replace(file)
