"""Messages between a node and its gossip process, over the process's stdin and stdout.

    frame = length of the rest (4 bytes, big-endian) | msgpack of one record below

Frames to the process are `Command`s, frames from it `Event`s. Both sides refuse a frame that is larger than
`MAX_FRAME_BYTES` or not of the schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from swarm_protocol.codec import SPOKEN, decode_as
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.gossip_kinds import MAX_TOPICS
from swarm_protocol.limits import MAX_ADDRESS_CHARS, MAX_ADDRESSES, MAX_BATCH_BYTES, MAX_CLOCK_SKEW_S, MAX_SHARDS
from swarm_protocol.manifest import ManifestLimits
from swarm_protocol.messages import Count, Hash64
from swarm_protocol.transports.pacing import bytes_s
from swarm_protocol.transports.refusals import Refused
from swarm_protocol.transports.settings import NetworkSettings

FRAME_HEAD_BYTES = 4
MAX_FRAME_BYTES = MAX_BATCH_BYTES + 64 * 1024
"""A whole signed batch with its topic; the longest status (1024 peer ids of 52 characters) fits in as well."""
MAX_CONNECTIONS = 512  # a Python process decrypts some 50 MB/s; beyond a few hundred connections it is not a useful hub
MAX_HOST_CHARS = MAX_ADDRESS_CHARS - len("/dns4//tcp/65535/p2p/") - 52
"""Length of an announced host: with port and gossip id it must fit into an address."""
MAX_STATUS_SOURCES = 32  # sources of refusals in a status
PIPE_READ_BYTES = 256 * 1024  # bytes read from the pipe at a time
STRETCH = 2
"""Factor on the swarm's limits. Messages sent within them may be delayed for up to a minute and arrive with new
ones."""

Data = Annotated[bytes, Meta(max_length=MAX_BATCH_BYTES)]
Topic = Annotated[str, Meta(min_length=1, max_length=128)]
PeerAddress = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
Host = Annotated[str, Meta(max_length=MAX_HOST_CHARS, pattern=r"^[A-Za-z0-9.:_-]+\Z")]
Name = Annotated[str, Meta(max_length=64)]  # a gossip id, a reason or a source of refusals
PortNumber = Annotated[int, Meta(ge=0, lt=65536)]


class GossipSettings(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Settings of the gossip process; always the first command."""

    swarm: Hash64
    shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)] = 1
    listen: Annotated[str, Meta(max_length=64)] = "0.0.0.0"  # IP address to listen on
    port: PortNumber = 0  # TCP port to listen on, or the next free one; 0 = any
    dial_only: bool = False  # never listen
    announce: Annotated[list[Host], Meta(max_length=MAX_ADDRESSES)] = []
    """IP addresses or host names under which others reach this port; announced first."""
    degree: Annotated[int, Meta(ge=1, le=64)] = 6
    """Peers that a message is passed on to, per topic; two thirds to double of it. Peers that dialled us come on top:
    they may have nobody else."""
    max_connections: Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)] = 64
    messages_per_minute: Annotated[int, Meta(ge=1)] = 240
    """Messages of rollouts of one author, and of one connected process. More are refused and not forwarded."""
    bytes_per_minute: Annotated[int, Meta(ge=1)] = 8 * 2**20
    """Bytes of rollouts of one author, and of one connected process. More are refused and not forwarded."""
    max_age_s: Annotated[float, Meta(gt=0)] = 600.0  # older rollouts are refused
    max_skew_s: Annotated[float, Meta(ge=0)] = MAX_CLOCK_SKEW_S  # messages from further in the future are refused
    upload_bytes_s: Annotated[float, Meta(ge=0)] = 0.0  # limit on what all connections send together; 0 = no limit
    download_bytes_s: Annotated[float, Meta(ge=0)] = 0.0  # limit on what all connections receive together; 0 = no limit
    spoken: Annotated[tuple[Count, ...], Meta(max_length=2)] = tuple(sorted(SPOKEN))
    """Protocol versions that the node understands. The process may have been restarted from files that were upgraded
    meanwhile."""


class Subscribe(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Have messages on `topic` delivered; and pass them on."""

    topic: Topic


class Publish(msgspec.Struct, frozen=True, tag=True, array_like=True):
    topic: Topic
    data: Data


class Dial(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Connect to a peer's gossip process: a multiaddress that ends in its id."""

    address: PeerAddress


class Drop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Hang up on these."""

    ids: Annotated[list[Name], Meta(max_length=MAX_CONNECTIONS)]


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for a `Status`."""

    number: Count


class GossipReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process listens under this id."""

    gossip_id: Name
    addresses: Annotated[list[PeerAddress], Meta(max_length=MAX_ADDRESSES)]
    port: PortNumber  # 0 if it does not listen


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message of another peer that passed the gate; each once."""

    topic: Topic
    data: Data


class Status(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Levels now, totals since the process began."""

    number: Count  # number of the `Ask`
    peers: Annotated[list[Name], Meta(max_length=MAX_CONNECTIONS)]  # peers that speak gossip with this node
    mesh: Annotated[dict[Topic, Count], Meta(max_length=MAX_TOPICS)]  # peers that messages on a topic go to directly
    bytes_in: Count
    """Read from TCP sockets: encryption, multiplexing and gossip's own talk included; without TCP and IP headers."""
    bytes_out: Count
    messages_in: Count
    messages_out: Count
    dropped: Count  # messages that the node was too slow to take
    rejected: Annotated[dict[Name, Count], Meta(max_length=64)]  # messages, frames and connections refused, by reason
    ways: Annotated[dict[Name, PeerAddress], Meta(max_length=MAX_CONNECTIONS)] = {}
    """Gossip id -> address at the other end of its connection, without the id."""
    sources: Annotated[dict[Name, Refused], Meta(max_length=MAX_STATUS_SOURCES)] = {}
    """IPv4 address, or /64 of IPv6 -> its refusals; the latest sources."""


Command = GossipSettings | Subscribe | Publish | Dial | Drop | Ask
Event = GossipReady | Message | Status

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def gossip_settings(swarm: str, shards: int, limits: ManifestLimits, network: NetworkSettings) -> GossipSettings:
    """Settings that refuse no peer within the swarm's `limits`; a message carries at least one group.

    Raises LocalProtocolError for settings that the gossip process would refuse.
    """
    settings = GossipSettings(
        swarm=swarm,
        shards=shards,
        listen=network.listen,
        port=network.gossip_port,
        dial_only=network.dial_only,
        announce=[item for item in network.announce if not item.startswith("/")],  # those are of the DHT port
        max_connections=network.max_connections,
        messages_per_minute=STRETCH * limits.groups_per_minute,
        bytes_per_minute=STRETCH * limits.bytes_per_minute,
        max_age_s=limits.max_age_s,
        upload_bytes_s=bytes_s(network.max_upload_mbit),
        download_bytes_s=bytes_s(network.max_download_mbit),
    )
    try:
        return msgspec.convert(msgspec.to_builtins(settings), GossipSettings)
    except msgspec.ValidationError as error:
        raise LocalProtocolError(f"these settings cannot be used for gossip: {error}") from error


def frame(record: Any) -> bytes:
    body = _encoder.encode(record)
    return len(body).to_bytes(FRAME_HEAD_BYTES, "big") + body


class Frames(Generic[T]):
    """Cuts a byte stream into records of type `T`. Holds at most one frame and the bytes that came with it."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The records completed by `data`. Raises RemoteProtocolError: size or schema."""
        self._buffer += data
        records = []
        while len(self._buffer) >= FRAME_HEAD_BYTES:
            size = int.from_bytes(self._buffer[:FRAME_HEAD_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise RemoteProtocolError("size", f"frame of {size} bytes")
            if len(self._buffer) < FRAME_HEAD_BYTES + size:
                break
            body = bytes(self._buffer[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + size])
            del self._buffer[: FRAME_HEAD_BYTES + size]
            records.append(decode_as(self._decoder, body))
        return records
