"""The swarm's model from members who are honest, lie, vanish, are slow, or have never heard of such requests."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_node.errors import UserError
from swarm_node.swarm.base_weights import fetching
from swarm_node.swarm.base_weights.fetching import Donors
from swarm_node.swarm.base_weights.files import Draft, Model, holds, list_model
from swarm_node.swarm.base_weights.finding import fetch_model
from swarm_node.swarm.base_weights.giving import MAX_UPLOAD_SLOTS, Giver
from swarm_protocol.codec import spoken_by, version_for
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.manifest import ManifestModel
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.model_listing import MODEL_METHOD, digest_of, encode_listing
from swarm_protocol.tensors import BlobHead, decode_head, encode_head
from swarm_protocol.transports.base import Accepted, Acceptor, Outgoing
from swarm_protocol.transports.memory import LinkModel, MemoryNetwork, MemoryTransport, VirtualClock
from tests.support.disks import leave
from tests.support.model_folders import PIECE, make_model

SWARM = "5a" * 32
HOME = LinkModel()


class World:
    """A swarm in memory with a newcomer who has nothing."""

    def __init__(self, tmp_path: Path, size: int = 30_500) -> None:
        self.folder = make_model(tmp_path / "given", size=size)
        listing = list_model(self.folder)
        self.model = Model(digest_of(encode_listing(listing)), self.folder, listing)
        self.wanted = ManifestModel("org/model", self.model.digest, listing.size)
        self.clock = VirtualClock()
        self.network = MemoryNetwork(self.clock, seed=3)
        self.newcomer = self.network.join("newcomer", SWARM)
        self.nodes: dict[str, MemoryTransport] = {}
        self.said: list[str] = []
        self.donors = Donors(self.newcomer, SWARM, [], self.said.append, self.clock.now, self.wait, random.Random(0))

    def wait(self, running: Collection[Future[None]], seconds: float) -> None:
        self.clock.run_until(self.clock.now() + seconds)

    def join(self, name: str, link: LinkModel = HOME) -> MemoryTransport:
        """A member; known to all after `meet`."""
        node = self.nodes[name] = self.network.join(name, SWARM, link, self.newcomer.addresses)
        node.announce(PeerCard(PROTOCOL_VERSION, SWARM, self.clock.now(), name, ["trainer"]))
        return node

    def giver(self, name: str, link: LinkModel = HOME, **options: Any) -> Giver:
        """A member who has the model."""
        return Giver(self.join(name, link), SWARM, self.model, self.said.append, now=self.clock.now, **options)

    def liar(self, name: str, alter: Callable[[str, bytes], tuple[str, bytes]]) -> MemoryTransport:
        """A member who says something else than is asked for."""
        node, giver = self.join(name), SimpleNamespace(transport=None)
        fake: Any = SimpleNamespace(accept=lambda method, acceptor: setattr(giver, "accept", acceptor))
        Giver(fake, SWARM, self.model, self.said.append, now=self.clock.now)

        def accept(peer: str, head: bytes, size: int) -> Accepted:
            honest = giver.accept(peer, head, size)
            sha256, data = alter(decode_head(head, BlobHead).sha256, b"".join(map(bytes, honest.ours.pieces())))
            head = encode_head(BlobHead(PROTOCOL_VERSION, SWARM, sha256))
            return Accepted(Outgoing(head, len(data), lambda: [data]), honest.sink, honest.done)

        node.accept(MODEL_METHOD, accept)
        return node

    def meet(self) -> None:
        self.clock.run_until(self.clock.now() + 10.0)

    def fetch(self, **options: Any) -> Model:
        return fetch_model(self.wanted, self.donors, self.said.append, **options)

    def is_here(self, found: Model) -> None:
        """Whole, right, and nothing else beside it."""
        assert found.digest == self.model.digest and found.folder != self.folder
        assert holds(found.folder, self.model.listing)
        names = {path.name for path in found.folder.iterdir()}
        assert names == {"config.json", "tokenizer.json", "model.safetensors", "listing.json"}
        assert not list(found.folder.parent.glob("*.partial"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --------------------------------------------------------------------- honest members


def test_the_model_comes_from_several_members_at_once(world: World) -> None:
    givers = [world.giver(name) for name in "abc"]
    world.meet()
    world.is_here(world.fetch())
    assert all(giver.given["newcomer"] for giver in givers)
    assert world.newcomer.bytes_in >= world.wanted.bytes
    assert world.newcomer.bytes_in < 1.1 * world.wanted.bytes + 20_000  # the listing, and heads
    assert not world.donors.liars


def test_a_cached_model_is_asked_of_nobody(world: World) -> None:
    world.giver("a")
    world.meet()
    found = world.fetch()
    before = world.newcomer.bytes_in
    assert world.fetch() == found and world.newcomer.bytes_in == before
    (found.folder / "model.safetensors").write_bytes(b"cut off")
    world.is_here(world.fetch())
    assert world.newcomer.bytes_in > before


def test_pieces_at_hand_are_copied_not_sent(world: World, tmp_path: Path) -> None:
    giver = world.giver("a")
    near = tmp_path / "near"
    shutil.copytree(world.folder, near)
    data = bytearray((near / "model.safetensors").read_bytes())
    data[5 * PIECE] ^= 1
    (near / "model.safetensors").write_bytes(data)
    (near / "tokenizer.json").write_bytes(b"other")
    world.meet()
    world.is_here(world.fetch(near=[near, tmp_path / "none"]))
    listing = len(encode_listing(world.model.listing))
    assert giver.given["newcomer"] == listing + PIECE + 1200  # that piece, and the tokenizer


def test_equal_pieces_travel_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    (world.folder / "model.safetensors").write_bytes(bytes(50 * PIECE))
    listing = list_model(world.folder)
    world.model = Model(digest_of(encode_listing(listing)), world.folder, listing)
    world.wanted = ManifestModel("zeros", world.model.digest, listing.size)
    giver = world.giver("a")
    world.meet()
    world.is_here(world.fetch())
    assert giver.given["newcomer"] < 10 * PIECE + len(encode_listing(listing))


def test_newcomers_are_served_few_pieces_at_once(world: World) -> None:
    giver = world.giver("a", LinkModel(bandwidth_bytes_s=10_000), max_upload_mbit=2.0)
    world.meet()
    sha256 = world.model.listing.files[0].pieces[0]
    head = encode_head(BlobHead(PROTOCOL_VERSION, SWARM, sha256))
    first = giver.accept("p", head, 0)
    with pytest.raises(RemoteProtocolError) as caught:
        giver.accept("q", head, 0)
    assert caught.value.reason == "busy"
    first.done(None)
    giver.accept("q", head, 0).done(RemoteProtocolError("torn"))
    with pytest.raises(RemoteProtocolError, match="busy"):  # who did not take it waits
        giver.accept("q", head, 0)
    giver.accept("p", head, 0).done(None)
    world.is_here(world.fetch())


def test_slow_takers_keep_nobody_from_the_model(world: World) -> None:
    """The largest piece at the least rate takes five minutes; whoever is fast is not to wait for that each time."""
    now = [0.0]
    giver = Giver(world.join("a"), SWARM, world.model, world.said.append, now=lambda: now[0])
    head = encode_head(BlobHead(PROTOCOL_VERSION, SWARM, world.model.listing.files[1].pieces[0]))
    held: list[tuple[float, Accepted]] = []
    served, full, seconds = 0, 0, 4000

    def take(peer: str) -> bool:
        try:
            accepted = giver.accept(peer, head, 0)
        except RemoteProtocolError as error:
            assert error.reason == "busy"
            return False
        if peer == "honest":
            accepted.done(None)
        else:
            held.append((now[0] + 280.0, accepted))
        return True

    for second in range(seconds):
        now[0] = float(second)
        for over, accepted in [one for one in held if one[0] <= second]:
            accepted.done(None)
            held.remove((over, accepted))
        for peer in ("slow", "slow", "slower", "slower"):  # first, each time
            take(peer)
        served += take("honest")
        full += len(held) == 4
    assert full > 250 and served > seconds / 2


def test_a_slow_taker_alone_need_not_wait(world: World) -> None:
    now = [0.0]
    giver = Giver(world.join("a"), SWARM, world.model, world.said.append, now=lambda: now[0])
    head = encode_head(BlobHead(PROTOCOL_VERSION, SWARM, world.model.listing.files[1].pieces[0]))
    for _ in range(5):
        accepted = giver.accept("slow", head, 0)
        now[0] += 200.0
        accepted.done(None)
    giver.accept("other", head, 0).done(None)
    with pytest.raises(RemoteProtocolError, match="busy"):
        giver.accept("slow", head, 0)
    now[0] += 21.0
    giver.accept("slow", head, 0).done(None)


@pytest.mark.parametrize(
    ("head", "size", "reason"),
    [
        (b"", 0, "schema"),
        (b"\xff" * 99, 0, "schema"),
        (encode_head(BlobHead(PROTOCOL_VERSION, SWARM, "0" * 64)), 0, "unknown"),
        (encode_head(BlobHead(PROTOCOL_VERSION, "0" * 64, "0" * 64)), 0, "swarm"),
        (encode_head(BlobHead(PROTOCOL_VERSION, SWARM, "0" * 64)), 1, "size"),
    ],
)
def test_nothing_else_is_given(world: World, head: bytes, size: int, reason: str) -> None:
    giver = world.giver("a")
    for _ in range(MAX_UPLOAD_SLOTS):
        with pytest.raises(RemoteProtocolError) as caught:
            giver.accept("p", head, size)
        assert caught.value.reason == reason
    whole = BlobHead(PROTOCOL_VERSION, SWARM, world.model.digest)
    assert giver.accept("p", encode_head(whole), 0), "those took no places"


# --------------------------------------------------------------------- others

LIES: dict[str, Callable[[str, bytes], tuple[str, bytes]]] = {
    "other bytes": lambda sha256, data: (sha256, bytes(len(data))),
    "one bit": lambda sha256, data: (sha256, data[:-1] + bytes([data[-1] ^ 1])),
    "fewer": lambda sha256, data: (sha256, data[:-1]),
    "more": lambda sha256, data: (sha256, data + b"\0"),
    "nothing": lambda sha256, data: (sha256, b""),
    "something else": lambda sha256, data: ("0" * 64, data),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_liars_are_counted_and_never_asked_again(world: World, lie: Any) -> None:
    world.liar("liar", lie)
    world.meet()
    with pytest.raises(UserError, match="1 gave something else"):
        world.fetch(patience_s=100.0)
    assert world.donors.liars == {"liar"}
    assert sum("liar gives something else" in sentence for sentence in world.said) == 1
    assert world.newcomer.bytes_in < 10_000
    world.giver("honest")
    world.meet()
    world.is_here(world.fetch())


def test_a_lie_is_counted_by_the_transport(world: World) -> None:
    world.liar("liar", LIES["one bit"])
    world.meet()
    with pytest.raises(UserError):
        world.fetch(patience_s=20.0)
    assert world.newcomer.rejected["digest"] == 1


def test_a_partial_liar_is_caught_at_once(world: World) -> None:
    pieces = world.model.listing.files[1].pieces
    bad = set(pieces[3::4])
    world.liar("liar", lambda sha256, data: (sha256, bytes(len(data))) if sha256 in bad else (sha256, data))
    world.giver("a")
    world.meet()
    world.is_here(world.fetch())
    assert world.newcomer.rejected["digest"] <= 2  # both that were on their way


def test_members_that_vanish_do_not_end_it(world: World) -> None:
    slow = LinkModel(bandwidth_bytes_s=20_000)
    for name in "abc":
        world.giver(name, slow)
    world.meet()
    for after, name in ((0.5, "a"), (0.8, "b")):
        world.clock.call_at(world.clock.now() + after, world.network.kill, name)
    world.is_here(world.fetch())
    assert world.donors.donors["a"].accidents and world.donors.donors["b"].accidents


def test_a_slow_member_holds_up_nobody(world: World) -> None:
    world.giver("slow", LinkModel(bandwidth_bytes_s=10))
    world.giver("fast")
    world.meet()
    began = world.clock.now()
    world.is_here(world.fetch())
    assert world.clock.now() - began < 20  # virtual seconds; one piece takes the slow one a hundred


def test_hanging_members_keep_nobody_from_others(world: World) -> None:
    for i in range(10):
        world.giver(f"hangs{i}", LinkModel(bandwidth_bytes_s=0.01))
    world.giver("a")
    world.meet()
    began = world.clock.now()
    world.is_here(world.fetch())
    assert world.clock.now() - began < 60  # virtual seconds
    assert world.donors.donors["a"].given >= world.wanted.bytes


def test_members_of_before_and_without_it_are_skipped(world: World) -> None:
    for i in range(12):
        world.join(f"old{i}")

    def other(peer: str, head: bytes, size: int) -> Accepted:
        raise RemoteProtocolError("unknown")

    acceptor: Acceptor = other
    world.join("without").accept(MODEL_METHOD, acceptor)
    world.giver("a")
    world.meet()
    world.is_here(world.fetch())
    assert not world.donors.liars


def test_files_that_were_changed_are_refused_not_sent(world: World) -> None:
    world.giver("a")
    data = bytearray((world.folder / "model.safetensors").read_bytes())
    data[2 * PIECE] ^= 1
    (world.folder / "model.safetensors").write_bytes(data)
    world.meet()
    with pytest.raises(UserError):
        world.fetch(patience_s=30.0)
    assert sum("was changed" in sentence for sentence in world.said) == 1
    assert not world.donors.liars
    assert world.donors.donors["a"].given > world.wanted.bytes - 2 * PIECE  # all else came from it
    world.giver("b").model = Model(
        world.model.digest, make_model(world.folder.parent / "b", size=30_500), world.model.listing
    )
    world.meet()
    world.is_here(world.fetch())


@pytest.mark.parametrize("reason", ["version", "swarm", "gone", "size", "schema", "a-later-one"])
def test_a_peer_that_refused_is_asked_later(world: World, reason: str) -> None:
    giver = world.giver("a")
    asked: list[float] = []

    def refuse(peer: str, head: bytes, size: int) -> Accepted:
        asked.append(world.clock.now())
        if asked[-1] < asked[0] + 30.0:
            raise RemoteProtocolError(reason, "as it is there")
        return giver.accept(peer, head, size)

    world.nodes["a"].accept(MODEL_METHOD, refuse)
    world.meet()
    world.is_here(world.fetch())
    assert not world.donors.liars
    assert sum(at < asked[0] + 30.0 for at in asked) < 5


@pytest.mark.parametrize(("protocol", "speaks", "expected"), [(4, 0, 4), (4, 5, 5), (5, 6, 5)])
def test_requests_use_the_newest_version_both_read(
    world: World, monkeypatch: pytest.MonkeyPatch, protocol: int, speaks: int, expected: int
) -> None:
    monkeypatch.setattr(fetching, "version_for", partial(version_for, spoken=spoken_by(5)))
    monkeypatch.setattr("swarm_protocol.codec.SPOKEN", spoken_by(5))
    giver = world.giver("a")
    node = world.nodes["a"]
    node.announce(PeerCard(protocol, SWARM, world.clock.now(), "a", ["trainer"], speaks=speaks))
    heads: list[bytes] = []

    def accept(peer: str, head: bytes, size: int) -> Accepted:
        answer = giver.accept(peer, head, size)
        heads.extend([head, answer.ours.head])
        return answer

    node.accept(MODEL_METHOD, accept)
    world.clock.run_until(world.clock.now() + 60.0)  # until its card has been renewed
    world.is_here(world.fetch())
    assert heads and {decode_head(head, BlobHead).protocol for head in heads} == {expected}


def test_nobody_has_it(world: World) -> None:
    with pytest.raises(UserError, match="none of 0 members has given the listing of model org/model for 7 s"):
        world.fetch(patience_s=7.0)


def test_a_listing_of_another_size_is_refused(world: World) -> None:
    world.giver("a")
    world.meet()
    world.wanted = ManifestModel("org/model", world.model.digest, world.wanted.bytes + 1)
    with pytest.raises(UserError, match="not of the size that its manifest says"):
        world.fetch()


def test_a_full_disk_is_noticed_before_sending(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cached: Path
) -> None:
    giver = world.giver("a")
    near = tmp_path / "near"
    shutil.copytree(world.folder, near)
    world.meet()
    leave(monkeypatch, 2**20)
    with pytest.raises(UserError, match="make room, or choose another disk with HF_HOME"):
        world.fetch(near=[near])
    assert giver.given["newcomer"] == len(encode_listing(world.model.listing))
    [partial_folder] = cached.glob("*.partial")
    assert [path.name for path in partial_folder.iterdir()] == ["listing.json"]


def test_a_model_that_is_whole_needs_no_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the last piece and the end."""
    world.giver("a")
    world.meet()

    def killed(self: Draft, folder: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "finish", killed)
        with pytest.raises(Killed):
            world.fetch()
    leave(monkeypatch, 0)
    world.is_here(world.fetch())


# --------------------------------------------------------------------- killed in between


class Killed(BaseException):
    """As SIGKILL, between two pieces."""


def die_after(world: World, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 0
    original = Donors.get

    def get(self: Donors, wanted: Any, keep: Any, *rest: Any) -> None:
        def kept_until(sha256: str, data: bytearray) -> None:
            nonlocal kept
            keep(sha256, data)
            kept += 1
            if kept > pieces:  # the listing is the first
                raise Killed

        original(self, wanted, kept_until, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Donors, "get", get)
        with pytest.raises(Killed):
            world.fetch()


def test_a_killed_download_goes_on_from_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    giver = world.giver("a")
    world.meet()
    die_after(world, 20, monkeypatch)
    world.clock.run_until(world.clock.now() + 60)  # what was on its way has ended
    before = giver.given["newcomer"]
    world.donors = Donors(world.newcomer, SWARM, [], world.said.append, world.clock.now, world.wait, random.Random(1))
    world.is_here(world.fetch())
    assert giver.given["newcomer"] - before <= world.wanted.bytes - 18 * PIECE  # two were short
    assert any("of it are here" in sentence for sentence in world.said)


def test_damaged_files_are_fetched_again(world: World, monkeypatch: pytest.MonkeyPatch, cached: Path) -> None:
    world.giver("a")
    world.meet()
    die_after(world, 20, monkeypatch)
    world.clock.run_until(world.clock.now() + 60)
    partial = cached / f"{world.model.digest}.partial"
    data = bytearray((partial / "model.safetensors").read_bytes())
    data[:3000] = bytes(3000)
    (partial / "model.safetensors").write_bytes(data)
    world.is_here(world.fetch())
