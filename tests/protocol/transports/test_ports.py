"""Which port a node takes, that nobody else takes it, and that a damaged note is as good as none."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.transports.ports import Port, choose_ports, lost_port, note_ports
from swarm_protocol.transports.settings import PORTS_TRIED, NetworkSettings

LOOPBACK = "127.0.0.1"


@pytest.fixture
def ports() -> Iterator[tuple[int, int, int, int]]:
    """Two ports that are taken, then two that are free."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three, socket.socket() as four:
        for taken in (one, two, three, four):
            taken.bind((LOOPBACK, 0))
            taken.listen()
        numbers = [taken.getsockname()[1] for taken in (one, two, three, four)]
        three.close()
        four.close()
        yield numbers[0], numbers[1], numbers[2], numbers[3]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Releases the ports that a test took."""
    with ExitStack() as stack:
        yield stack


def take(stack: ExitStack, wanted: int) -> Port:
    port = Port(LOOPBACK, wanted)
    stack.callback(port.release)
    port.take()
    return port


def choose(port: int, gossip_port: int, file: Path) -> tuple[int, int, list[str]]:
    said: list[str] = []
    found = choose_ports(NetworkSettings(listen=LOOPBACK, port=port, gossip_port=gossip_port), file, said.append)
    numbers = []
    for one in found:
        assert one is not None
        numbers.append(one.number)
        one.release()
    return numbers[0], numbers[1], said


# --------------------------------------------------------------------- a port of one's own


def test_claimed_ports_are_left_alone(stack: ExitStack) -> None:
    first = take(stack, 0)
    second, third = take(stack, first.number), take(stack, first.number)
    assert first.number < second.number < third.number <= first.number + 5
    assert first.take() == first.number  # it stays the same
    first.release()
    assert take(stack, first.number).number == first.number


def test_a_claim_ends_with_its_process(stack: ExitStack, root: Path) -> None:
    script = (
        "import sys; from swarm_protocol.transports.ports import Port\n"
        f"port = Port('{LOOPBACK}', int(sys.argv[1])); print(port.take(), flush=True); sys.stdin.read()"
    )
    mine = take(stack, 0)
    command = [sys.executable, "-c", script, str(mine.number)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    with process:
        assert process.stdout is not None
        theirs = int(process.stdout.readline())
        assert theirs > mine.number
        assert take(stack, theirs).number > theirs
        process.kill()
    assert take(stack, theirs).number == theirs


def test_ports_taken_meanwhile_give_way(stack: ExitStack) -> None:
    said: list[str] = []
    port = Port(LOOPBACK, 0, report=said.append)
    stack.callback(port.release)
    before = port.take()
    with socket.socket() as other:
        other.bind((LOOPBACK, before))
        other.listen()
        after = port.take()
        assert after != before and said == [f"port {before} is taken: listening on {after}"]
    assert take(stack, before).number == before  # no claim is left on it


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only systems with /proc tell")
def test_two_programs_on_one_port_are_noticed(stack: ExitStack) -> None:
    port = take(stack, 0)
    with socket.socket() as ours, socket.socket() as other:
        for one in (ours, other):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as both programs do
            one.bind((LOOPBACK, port.number))
        assert not port.is_shared()
        ours.listen()
        assert not port.is_shared()
        other.listen()
        assert port.is_shared()


def test_that_none_is_left_is_said(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_protocol.transports.ports._claim", lambda number: None)
    port = Port(LOOPBACK, 41000)
    with pytest.raises(LocalProtocolError, match=f"ports 41000 to {41000 + PORTS_TRIED - 1} of {LOOPBACK}"):
        port.take()
    with pytest.raises(LocalProtocolError, match="all taken"):
        Port(LOOPBACK, 0).take()
    with pytest.raises(LocalProtocolError, match=r"192\.0\.2\.1"):
        Port("192.0.2.1", 41000).take()


# --------------------------------------------------------------------- from run to run


def test_earlier_ports_replace_taken_ones(tmp_path: Path, ports: tuple[int, int, int, int]) -> None:
    one, two, free, other = ports
    file = tmp_path / "ports.json"
    note_ports(NetworkSettings(port=one, gossip_port=two), free, other, file)
    said = [f"port {wanted} is taken: listening on {got}, as last time" for wanted, got in ((one, free), (two, other))]
    assert choose(one, two, file) == (free, other, said)
    assert choose_ports(NetworkSettings(port=one, gossip_port=two, dial_only=True), file, said.append) == (None, None)


@pytest.mark.parametrize("note", ["", "[]", "{%d: 70000}", "{%d: 80}", "{%d: -1}", '{%d: "x"}', "\xff", '{"a": 1}'])
def test_without_a_note_next_ports_are_taken(tmp_path: Path, ports: tuple[int, int, int, int], note: str) -> None:
    file = tmp_path / "ports.json"
    file.write_text(note.replace("%d", f'"{ports[0]}"'), encoding="latin-1")
    port, gossip_port, said = choose(ports[0], ports[0], file)
    assert ports[0] < port < gossip_port < ports[0] + PORTS_TRIED  # one node's own are two
    assert said == [f"port {ports[0]} is taken: listening on {got}" for got in (port, gossip_port)]


def test_what_is_free_is_taken_as_wanted(tmp_path: Path, ports: tuple[int, int, int, int]) -> None:
    _, _, free, other = ports
    file = tmp_path / "ports.json"
    note_ports(NetworkSettings(port=free, gossip_port=other), 40000, 40001, file)
    assert choose(free, other, file) == (free, other, [])


def test_any_port_means_the_last_one(tmp_path: Path, ports: tuple[int, int, int, int]) -> None:
    one, _, free, other = ports
    file = tmp_path / "ports.json"
    note_ports(NetworkSettings(port=0, gossip_port=0), free, other, file)
    assert choose(0, 0, file) == (free, other, [])
    note_ports(NetworkSettings(port=0, gossip_port=0), one, other, file)
    port, gossip_port, said = choose(0, 0, file)
    assert port not in (0, one, other) and gossip_port == other and said == []


def test_a_default_gives_way_to_the_last_port(
    tmp_path: Path, ports: tuple[int, int, int, int], stack: ExitStack
) -> None:
    taken, _, free, other = ports
    said: list[str] = []

    def got(last: int) -> int:
        port = Port(LOOPBACK, free, last, said.append, named=False)
        stack.callback(port.release)
        port.take()
        port.release()
        return port.number

    assert got(other) == other  # `free` may be that of a bootstrap that is down
    assert said == [f"listening on port {other}, as last time"]
    assert got(taken) == got(0) == got(free) == free
    assert len(said) == 1
    file = tmp_path / "ports.json"
    settings = NetworkSettings(listen=LOOPBACK, port=free, gossip_port=0, named_ports=("gossip_port",))
    note_ports(settings, other, 0, file)
    dht, gossip = choose_ports(settings, file, said.append)
    assert dht is not None and gossip is not None and dht.number == other
    stack.callback(dht.release)
    stack.callback(gossip.release)


def test_a_port_that_another_has_now_is_noticed(
    tmp_path: Path, ports: tuple[int, int, int, int], stack: ExitStack
) -> None:
    taken, _, free, other = ports
    file = tmp_path / "ports.json"
    assert lost_port(LOOPBACK, free, file) == 0
    for last, lost in ((taken, taken), (other, 0), (80, 0), (70000, 0)):
        note_ports(NetworkSettings(port=free), last, 0, file)
        assert lost_port(LOOPBACK, free, file) == lost
    note_ports(NetworkSettings(port=free), other, 0, file)
    take(stack, other)  # by a node that does not listen yet
    assert lost_port(LOOPBACK, free, file) == other
