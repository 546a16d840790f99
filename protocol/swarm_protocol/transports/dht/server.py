"""This swarm's DHT: cards of members under `MEMBERSHIP_BUCKETS` keys, at the nodes whose ids are nearest to them.

    store_card    -> own copy + the REPLICAS nearest peers + some that are connected
    find_cards    -> own copy + the BEAM nearest peers + some that are connected

On the wire it is hivemind 1.1.12's DHT (`DHTProtocol`: ping, store, find). Only hivemind's routing table and calls are
used. Its handlers decode everything, believe any node id, and build answers without a limit. Here a peer's node id
follows from its key, messages are read with a schema (`messages`), and an answer has a limited size.

Bad data from a peer raises only into the answer to that peer. It is counted in `refusals`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID, ServicerBase
from hivemind.proto import dht_pb2

from swarm_protocol.budgets import Budgets
from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.introductions import Introductions
from swarm_protocol.limits import MEMBERSHIP_BUCKETS
from swarm_protocol.transports.dht import messages
from swarm_protocol.transports.dht.lookup import SMALL_SWARM, Search
from swarm_protocol.transports.dht.messages import MAX_BUCKET_CARDS, MAX_NEAREST, CardRecord, node_id_of
from swarm_protocol.transports.dht.neighbours import Neighbours
from swarm_protocol.transports.dht.records import STORED_EACH, CardStorage, CardValidator
from swarm_protocol.transports.refusals import Refusals

REPLICAS = 5  # nearest peers that keep a card: hivemind's default
DHT_CALL_S = 3.0  # longest that a peer may take to answer; hivemind's default
MAX_ANSWER_CARDS_BYTES = 3 * 2**20
"""Cards in one answer: with the peers named beside them (20 KB) it stays well below the 4 MiB of a message of p2pd."""
MAX_GIVEN_BYTES = 32 * 2**20
"""Cards that one peer gets in a minute: ten answers of the largest size, which only a newcomer to a swarm of thousands
asks for. Beyond, it gets answers without cards."""
MAX_FINDS = 600
"""Finds of one peer in a minute: a node makes one to five a round, and a round takes a second at least. Each takes this
node 1 ms, or 7 ms where all buckets are full."""
MAX_PINGS_AND_STORES = 1200
"""Pings and stores of one peer in a minute, and the cards in these: a node stores its own card every 15 s, or once a
round while nobody takes it, and pings when it connects. Each takes this node a signature or less."""
MAX_REFUSED = 600
"""Calls of one peer that are refused in a minute before it is hung up on: an answer, also a refusal, costs as much as a
store. A handshake costs the peer as much as this node."""
ASKERS = 1024  # peers whose use of the budgets is remembered: more than p2pd has connections
BREATHE = 64  # records checked before others get their turn: some 10 ms of signatures
_FAILURES = (P2PDaemonError, P2PHandlerError, PeerUnreachable, OSError, EOFError, DecodeError)
"""Errors of a call to a peer. `OSError` includes running into the time limit; `PeerUnreachable` is raised for a peer
that is known only by name and cannot be dialled."""

T = TypeVar("T")
Found = dict[str, tuple[bytes, float]]  # peer id -> value and expiration of its newest card


class CardDHT(ServicerBase):  # type: ignore[misc]
    """One node's part in the DHT, over one p2pd. `client`: it asks, and is not asked."""

    def __init__(
        self,
        p2p: P2P,
        peer: str,
        validator: CardValidator,
        storage: CardStorage,
        refusals: Refusals,
        client: bool,
        named: Callable[[str, Iterable[PeerID]], None],
    ) -> None:
        """`named` is called with the peers that a peer named in an answer."""
        super().__init__()
        self.me = PeerID.from_base58(peer)
        self.neighbours = Neighbours(self.me, refusals, self.ping)
        self.storage = storage
        self._p2p = p2p
        self._validator = validator
        self._refusals = refusals
        self._named = named
        self._info = dht_pb2.NodeInfo(node_id=b"" if client else node_id_of(self.me).to_bytes())
        self._mine: tuple[bytes, CardRecord] | None = None  # this node's own card, and its key
        self._given = Budgets(ASKERS, MAX_GIVEN_BYTES)
        self._calls = Budgets(ASKERS, MAX_FINDS, MAX_PINGS_AND_STORES, MAX_REFUSED)
        self._ending: dict[PeerID, asyncio.Future[Any]] = {}  # peers that are being hung up on
        self._rng = random.Random()

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"DHTProtocol.{method_name}"  # whatever this class is called

    # ---------------------------------------------------------------- what others ask

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        self._admit(request, context, told=1)
        return dht_pb2.PingResponse(peer=self._info, dht_time=time.time())

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """A peer wants cards kept: single ones, or buckets."""
        peer = self._admit(request, context, told=1)
        kept, left = [], STORED_EACH  # no more would be let in; this project's nodes send one
        for key, name, value, expiration in self._read(peer, messages.read_store, request):
            if name:
                records: Sequence[Any] = [(name, value, expiration)]
            elif key in self._validator:
                records = self._read(peer, messages.decode_bucket, value)
            else:
                self._refusals.note(peer, "key")
                raise RemoteProtocolError("key", "not a bucket of this swarm's members")
            self._take_call(context.remote_id, 0, len(records[:left]))
            checked = await self._checked(self._validator.stored, peer, key, records[:left])
            left -= len(records[:left])
            kept_now = [self.storage.store(key, *record, time.time(), record[0] == peer) for record in checked]
            kept.append(bool(records) and len(checked) == len(records) and all(kept_now))
        return dht_pb2.StoreResponse(store_ok=kept, peer=self._info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Answer with the cards under some keys, and the peers nearest to these."""
        peer, asker_id = self._admit(request, context, finds=1), node_id_of(context.remote_id)
        keys = self._read(peer, messages.read_keys, request.keys)
        held = [self._held(key) for key in keys]
        sizes = [sum(len(value) + 80 for _, value, _ in records) for records in held]
        rooms = messages.shares(sizes, MAX_ANSWER_CARDS_BYTES)
        answer = dht_pb2.FindResponse(peer=self._info)
        for key, records, size, room in zip(keys, held, sizes, rooms, strict=True):
            result = answer.results.add(type=dht_pb2.NOT_FOUND)
            if records and self._given.take(peer, time.time(), min(size, room)):
                result.type = dht_pb2.FOUND_DICTIONARY
                result.value = messages.encode_bucket(self._some(records, size, room))
                result.expiration_time = max(expiration for _, _, expiration in records)
            elif records:
                self._refusals.note(peer, "rate")
            nearest = self.neighbours.get_nearest_neighbors(DHTID.from_bytes(key), MAX_NEAREST, exclude=asker_id)
            for node_id, near in nearest:
                result.nearest_node_ids.append(node_id.to_bytes())
                result.nearest_peer_ids.append(near.to_bytes())
        return answer

    def _admit(self, request: Any, context: P2PContext, finds: int = 0, told: int = 0) -> str:
        """The id of a peer that calls and may do so now. Raises RemoteProtocolError `rate`."""
        self._take_call(context.remote_id, finds, told)
        self.neighbours.meet(context.remote_id, request.peer.node_id)
        return str(context.remote_id)

    def _take_call(self, peer: PeerID, finds: int, told: int) -> None:
        """Count finds, or pings, stores and cards, of a peer. Raises RemoteProtocolError `rate` for more than a minute
        allows."""
        name, now = str(peer), time.time()
        if self._calls.take(name, now, finds, told, 0):
            return
        self._refusals.note(name, "rate")
        if not self._calls.take(name, now, 0, 0, 1) and peer not in self._ending:
            self._ending[peer] = asyncio.ensure_future(self._hang_up(peer))
        raise RemoteProtocolError(
            "rate", f"more than {MAX_FINDS} finds, or {MAX_PINGS_AND_STORES} pings, stores and cards, a minute"
        )

    async def _hang_up(self, peer: PeerID) -> None:
        try:
            with suppress(*_FAILURES):  # it has gone, or p2pd has
                await asyncio.wait_for(self._p2p._client.disconnect(peer), DHT_CALL_S)
        finally:
            del self._ending[peer]

    def _held(self, key: bytes) -> list[CardRecord]:
        """The cards under a key; this node's own comes first, and is there even if the bucket is full."""
        records = self.storage.records(key, time.time())
        if self._mine is not None and self._mine[0] == key:
            mine = self._mine[1]
            records = [mine, *(record for record in records if record[0] != mine[0])]
        return records

    def _some(self, records: list[CardRecord], size: int, room: int) -> list[CardRecord]:
        """As many cards as fit, drawn anew each time, so that a peer that asks again learns of others."""
        if size <= room:
            return records
        first, *rest = records
        self._rng.shuffle(rest)
        some, left = [first], room - len(first[1]) - 80
        for record in rest:
            left -= len(record[1]) + 80
            if left < 0:
                break
            some.append(record)
        return some

    # ---------------------------------------------------------------- what this node asks

    async def ping(self, peer: PeerID) -> bool:
        """Whether a peer answers and keeps a part of the DHT."""
        request = dht_pb2.PingRequest(peer=self._info)
        answer = await self._call(peer, self.get_stub(self._p2p, peer).rpc_ping(request, timeout=DHT_CALL_S))
        return answer is not None and answer.peer.node_id == node_id_of(peer).to_bytes()

    async def give_own(self, peer: PeerID) -> None:
        """Give a peer this node's card, if there is one that lives."""
        if self._mine is not None and self._mine[1][2] > time.time():
            await self._give(peer, *self._mine)

    async def store_card(self, key: bytes, record: CardRecord, direct: Collection[str]) -> int:
        """Keep this node's own card, and have it kept by others, some of them `direct`; by how many it is."""
        self._mine = key, record
        self.storage.store(key, *record, time.time(), is_own=True)
        also = self._not_avoided(direct)
        nearest = await self._search([key], {}, {})
        takers = dict.fromkeys([*nearest[key][:REPLICAS], *also])
        taken = await asyncio.gather(*(self._give(peer, key, record) for peer in takers))
        return sum(taken)

    async def find_cards(self, keys: Sequence[bytes], members: int, direct: Collection[str]) -> Found:
        """The newest card of each peer under these keys, from the peers nearest to each and from those in `direct`,
        while `members` others are known."""
        some = self._rng.sample(keys, max(1, len(keys) * SMALL_SWARM // max(SMALL_SWARM, members)))
        found: Found = {}
        for key in keys:
            _keep_newest(found, self._held(key))
        await self._search(keys, dict.fromkeys(self._not_avoided(direct), some), found)
        return found

    def forget_cards(self) -> None:
        """Forget the cards that are stored here, and which connections brought any: the clock was set back."""
        self.storage.clear()
        self._validator.stored.clear()
        self._validator.found.clear()

    async def look_around(self) -> None:
        """Ask for the peers nearest to this node, and let these know of it."""
        await self._search([node_id_of(self.me).to_bytes()], {}, {})

    def _not_avoided(self, peers: Iterable[str]) -> list[PeerID]:
        return [id for id in map(PeerID.from_base58, peers) if not self.neighbours.is_avoided(id)]

    async def _search(
        self, keys: Collection[bytes], also: Mapping[PeerID, Sequence[bytes]], found: Found
    ) -> dict[bytes, list[PeerID]]:
        """Key -> the peers nearest to it. `also` are asked for some keys; all valid cards go to `found`."""
        tables = [self.neighbours.get_nearest_neighbors(DHTID.from_bytes(key), MAX_NEAREST) for key in keys]
        known = {peer for near in tables for _, peer in near}
        return await Search(keys, known, also, lambda peer, keys: self._find(peer, keys, found), node_id_of).run()

    async def _find(self, peer: PeerID, keys: Sequence[bytes], found: Found) -> list[PeerID] | None:
        """Ask one peer; its valid cards go to `found`. The peers that it names, or None if it failed."""
        if self.neighbours.is_avoided(peer):
            return None
        request = dht_pb2.FindRequest(keys=keys, peer=self._info)
        answer = await self._call(peer, self.get_stub(self._p2p, peer).rpc_find(request, timeout=DHT_CALL_S))
        if answer is None:
            return None
        if len(answer.results) != len(keys):
            self._refusals.note(str(peer), "schema")
            self.neighbours.avoid(peer)
            return None
        named: set[PeerID] = set()
        for key, result in zip(keys, answer.results, strict=True):
            near, false = messages.read_nearest(result.nearest_node_ids, result.nearest_peer_ids)
            if false:
                self._refusals.note(str(peer), "node_id", false)
            named.update(near)
            if result.type == dht_pb2.NOT_FOUND or key not in self._validator:
                continue
            try:
                records = self._read(str(peer), messages.decode_bucket, result.value)
            except RemoteProtocolError:
                self.neighbours.avoid(peer)
                return None
            _keep_newest(found, await self._checked(self._validator.found, str(peer), key, records))
        named.discard(self.me)
        self._named(str(peer), named)
        return list(named)

    async def _give(self, peer: PeerID, key: bytes, record: CardRecord) -> bool:
        """Whether a peer took a card."""
        name, value, expiration = record
        request = dht_pb2.StoreRequest(
            keys=[key],
            subkeys=[msgspec.msgpack.encode(name)],
            values=[value],
            expiration_time=[expiration],
            in_cache=[False],
            peer=self._info,
        )
        answer = await self._call(peer, self.get_stub(self._p2p, peer).rpc_store(request, timeout=DHT_CALL_S))
        return answer is not None and any(answer.store_ok)

    async def _call(self, peer: PeerID, call: Awaitable[Any]) -> Any:
        """The answer of a peer, which may become a neighbour; without one None, and the peer is avoided for a while."""
        try:
            answer = await call
        except _FAILURES:
            self.neighbours.avoid(peer)
            return None
        self.neighbours.meet(peer, answer.peer.node_id)
        return answer

    # ---------------------------------------------------------------- what is believed

    async def _checked(
        self, account: Introductions, peer: str, key: bytes, records: Iterable[tuple[str | bytes, bytes, float]]
    ) -> list[CardRecord]:
        """The records that are cards and that `account` admits; the rest is counted against `peer`, which sent them."""
        checked, names = [], set()
        for place, (name, value, expiration) in enumerate(records, 1):
            try:
                if name in names:
                    raise RemoteProtocolError("schema", "two cards under one name")
                names.add(name)
                checked.append((self._validator.check(key, name, value, expiration, account, peer), value, expiration))
            except RemoteProtocolError as error:
                self._refusals.note(peer, error.reason)
            if place % BREATHE == 0:
                await asyncio.sleep(0)
        return checked

    def _read(self, peer: str, read: Callable[[Any], T], data: Any) -> T:
        try:
            return read(data)
        except RemoteProtocolError as error:
            self._refusals.note(peer, error.reason)
            raise


def _keep_newest(found: Found, records: Iterable[CardRecord]) -> None:
    """Add records to `found`, up to as many as all buckets hold."""
    for peer, value, expiration in records:
        held = found.get(peer)
        if held is None and len(found) < MEMBERSHIP_BUCKETS * MAX_BUCKET_CARDS or held and held[1] < expiration:
            found[peer] = value, expiration
