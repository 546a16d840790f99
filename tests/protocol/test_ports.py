"""Ports are remembered, and a damaged note is as good as none."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.transports.ports import note_ports, recall_ports
from protocol.transports.settings import NetworkSettings


@pytest.mark.parametrize(("port", "gossip_port"), [(31330, 31331), (0, 0), (0, 31331)])
def test_what_was_got_is_asked_for_again(tmp_path: Path, port: int, gossip_port: int) -> None:
    wanted, file = NetworkSettings(port=port, gossip_port=gossip_port), tmp_path / "ports.json"
    assert recall_ports(wanted, file) == wanted
    note_ports(wanted, 40000, 40001, file)
    again = recall_ports(wanted, file)
    assert (again.port, again.gossip_port) == (40000, 40001)
    other = NetworkSettings(port=5, gossip_port=6)  # another wish is another matter
    assert recall_ports(other, file) == other


@pytest.mark.parametrize("damaged", [b"", b"[]", b'{"31330": 70000}', b'{"31330": "x"}', b"\xff", b'{"a": 1}'])
def test_a_damaged_note_changes_nothing(tmp_path: Path, damaged: bytes) -> None:
    file = tmp_path / "ports.json"
    file.write_bytes(damaged)
    assert recall_ports(NetworkSettings(), file) == NetworkSettings()
