"""Which port a node takes, and that a damaged note is as good as none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.transports.ports import note_ports, recall_ports
from protocol.transports.settings import NetworkSettings


@pytest.fixture
def ports() -> Iterator[tuple[int, int, int, int]]:
    """Two ports that are taken, then two that are free."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three, socket.socket() as four:
        for taken in (one, two, three, four):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
        numbers = [taken.getsockname()[1] for taken in (one, two, three, four)]
        three.close()
        four.close()
        yield numbers[0], numbers[1], numbers[2], numbers[3]


def recall(port: int, gossip_port: int, file: Path, dial_only: bool = False) -> tuple[int, int, list[str]]:
    said: list[str] = []
    settings = NetworkSettings(listen="127.0.0.1", port=port, gossip_port=gossip_port, dial_only=dial_only)
    again = recall_ports(settings, file, said.append)
    return again.port, again.gossip_port, said


def test_what_was_got_takes_the_place_of_what_is_taken(tmp_path: Path, ports: tuple[int, int, int, int]) -> None:
    one, two, free, other = ports
    file = tmp_path / "ports.json"
    assert recall(one, two, file) == (one, two, [])
    note_ports(NetworkSettings(port=one, gossip_port=two), free, other, file)
    said = [f"port {wanted} is taken: listening on {got}, as last time" for wanted, got in ((one, free), (two, other))]
    assert recall(one, two, file) == (free, other, said)
    assert recall(one, two, file, dial_only=True) == (one, two, [])
    assert recall(two + 1, two + 2, file) == (two + 1, two + 2, [])  # another wish is another matter


def test_what_is_free_is_taken_as_wanted(tmp_path: Path, ports: tuple[int, int, int, int]) -> None:
    _, _, free, other = ports
    file = tmp_path / "ports.json"
    note_ports(NetworkSettings(port=free, gossip_port=other), 40000, 40001, file)
    assert recall(free, other, file) == (free, other, [])


def test_who_wants_any_gets_what_was_got(tmp_path: Path, ports: tuple[int, int, int, int]) -> None:
    one, _, free, other = ports
    file = tmp_path / "ports.json"
    note_ports(NetworkSettings(port=0, gossip_port=0), free, other, file)
    assert recall(0, 0, file) == (free, other, [])
    note_ports(NetworkSettings(port=0, gossip_port=0), one, other, file)
    assert recall(0, 0, file) == (0, other, [])


@pytest.mark.parametrize("note", ["", "[]", "{%d: 70000}", "{%d: 80}", "{%d: -1}", '{%d: "x"}', "\xff", '{"a": 1}'])
def test_a_damaged_note_changes_nothing(tmp_path: Path, ports: tuple[int, int, int, int], note: str) -> None:
    file = tmp_path / "ports.json"
    file.write_text(note.replace("%d", f'"{ports[0]}"'), encoding="latin-1")
    assert recall(ports[0], ports[2], file) == (ports[0], ports[2], [])
