"""Frames of gossip: those that wait for peers, and the one that is being read from each stream.

message -> `FrameCache`: one frame, shared -> `FrameQueue` of each peer that is given it, once -> stream

A frame is the bytes that are written, so that a message takes its room once, however many peers read it slowly. Any
peer may ask for a message as often as it likes: in the same request, in the next, by subscribing again, or over a new
stream. The message is put into a peer's queue once. What was given to whom is forgotten with the message.
"""

from __future__ import annotations

from libp2p.abc import INetStream
from libp2p.io.abc import Reader
from libp2p.peer.id import ID
from libp2p.pubsub.mcache import MessageCache, default_msg_id_fn
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.utils import encode_varint_prefixed
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

MAX_PEER_QUEUE, MAX_PEER_QUEUE_BYTES = 256, 16 * 2**20
"""Frames that wait for one peer, and their bytes; more are lost to it. The library's 32 are fewer than a dozen peers
send at once."""
CONTROL_FRAMES, CONTROL_BYTES = 32, 2**20
"""Room that control has beyond `MAX_PEER_QUEUE`, and within `MAX_PEER_QUEUE_BYTES`, where messages fill the rest."""
PIECE_BYTES, PIECE_COPIES = 2**16, 4
"""A frame is written in pieces of this size. The piece that is being written lies in memory so many times, as it is and
encrypted."""


class FrameQueue(RpcQueue):
    """Frames that wait for one peer."""

    def __init__(self) -> None:
        super().__init__(MAX_PEER_QUEUE + CONTROL_FRAMES)
        self.bytes = 0  # of all `frames`
        self._writing: bytes | None = None

    def push(self, rpc: rpc_pb2.RPC, priority: bool = False) -> bool:
        """Whether there was room for a frame of control."""
        return self._add(_frame(rpc), priority, MAX_PEER_QUEUE + CONTROL_FRAMES, MAX_PEER_QUEUE_BYTES)

    def push_message(self, frame: bytes) -> bool:
        """Whether there was room for the frame of a message."""
        return self._add(frame, False, MAX_PEER_QUEUE, MAX_PEER_QUEUE_BYTES - CONTROL_BYTES)

    def _add(self, frame: bytes, priority: bool, most: int, most_bytes: int) -> bool:
        if len(self) >= most or self.bytes + len(frame) > most_bytes:
            return False
        taken = super().push(frame, priority)  # type: ignore[arg-type]  # it looks into none
        self.bytes += len(frame) if taken else 0
        return taken

    async def pop(self) -> bytes | None:  # type: ignore[override]
        """The next frame; the one before has been written."""
        if self._writing is not None:
            self.bytes -= len(self._writing)
        self._writing = None
        self._writing = await super().pop()  # type: ignore[assignment]
        return self._writing

    def frames(self) -> list[bytes]:
        """The one that is being written, and those that wait, the next one first."""
        writing = [] if self._writing is None else [self._writing]
        return [*writing, *self._queue._priority, *self._queue._non_priority]  # type: ignore[list-item]

    def copied(self) -> int:
        """Bytes that writing takes beyond the frames themselves."""
        return 0 if self._writing is None else PIECE_COPIES * min(len(self._writing), PIECE_BYTES)


class FrameReader(Reader):
    """Reads the frames of one stream."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream
        self.bytes = 0  # of the frame that is being read, or was read last

    async def next(self, most: int) -> bytes:
        """The next frame, without its length. Raises MessageTooLarge, before anything of it is read, if it has more
        than `most` bytes; ParseError; and what streams raise."""
        self.bytes = 0
        return await read_varint_prefixed_bytes_limited(self, most)

    async def read(self, n: int | None = None) -> bytes:
        """Some of the next `n` bytes."""
        data = await self._stream.read(n)
        self.bytes += len(data)
        return data


class FrameCache(MessageCache):
    """The messages of the last seconds: one frame of each, that all peers share, and who was given it."""

    def __init__(self, window_size: int, history_size: int) -> None:
        super().__init__(window_size, history_size)
        self.frames: dict[bytes, bytes] = {}  # message id -> frame
        self._given: dict[bytes, set[ID]] = {}

    def put(self, msg: rpc_pb2.Message) -> None:
        message_id = default_msg_id_fn(msg)
        if message_id not in self.frames:
            self.frames[message_id], self._given[message_id] = _frame(rpc_pb2.RPC(publish=[msg])), set()
            super().put(rpc_pb2.Message(from_id=msg.from_id, seqno=msg.seqno, topicIDs=msg.topicIDs))

    def shift(self) -> None:
        """A heartbeat has passed: forget the oldest messages."""
        super().shift()
        for message_id in self.frames.keys() - self.msgs.keys():
            del self.frames[message_id], self._given[message_id]

    def give(self, peer: ID, message_id: bytes, queue: FrameQueue) -> None:
        """Have a message wait in the peer's queue, unless it is unknown, was given to the peer, or has no room."""
        frame = self.frames.get(message_id)
        if frame is not None and peer not in self._given[message_id] and queue.push_message(frame):
            self._given[message_id].add(peer)


def _frame(rpc: rpc_pb2.RPC) -> bytes:
    return encode_varint_prefixed(rpc.SerializeToString())
