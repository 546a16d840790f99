"""What waits for peers: the messages of the last seconds, and a queue of frames for each peer.

message -> `FrameCache`: one frame, shared -> `FrameQueue` of each peer that is given it, once -> stream

A message may be asked for by any peer, as often as that likes: in the same request, in the next, or by subscribing
again. It is put into a peer's queue once. What is given is forgotten with the message, or with the peer's connection.
"""

from __future__ import annotations

from libp2p.peer.id import ID
from libp2p.pubsub.mcache import MessageCache, default_msg_id_fn
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.rpc_queue import RpcQueue

MAX_PEER_QUEUE, MAX_PEER_QUEUE_BYTES = 256, 16 * 2**20
"""Frames that wait for one peer, and their bytes; more are lost to it. The library's 32 are fewer than a dozen peers
send at once."""
CONTROL_FRAMES, CONTROL_BYTES = 32, 2**20
"""Room that control has beyond `MAX_PEER_QUEUE`, and within `MAX_PEER_QUEUE_BYTES`, where messages fill the rest."""


class FrameQueue(RpcQueue):
    """Frames that wait for one peer."""

    def __init__(self) -> None:
        super().__init__(MAX_PEER_QUEUE + CONTROL_FRAMES)
        self.bytes = 0  # of all `frames`
        self._writing: rpc_pb2.RPC | None = None

    def push(self, rpc: rpc_pb2.RPC, priority: bool = False) -> bool:
        """Whether there was room for the frame."""
        size, frames, most = rpc.ByteSize(), MAX_PEER_QUEUE + CONTROL_FRAMES, MAX_PEER_QUEUE_BYTES
        if rpc.publish:
            frames, most = frames - CONTROL_FRAMES, most - CONTROL_BYTES
        if len(self) >= frames or self.bytes + size > most or not super().push(rpc, priority):
            return False
        self.bytes += size
        return True

    async def pop(self) -> rpc_pb2.RPC | None:
        """The next frame; the one before has been written."""
        if self._writing is not None:
            self.bytes -= self._writing.ByteSize()
        self._writing = None
        self._writing = await super().pop()
        return self._writing

    def frames(self) -> list[rpc_pb2.RPC]:
        """The one that is being written, and those that wait, the next one first."""
        writing = [] if self._writing is None else [self._writing]
        return [*writing, *self._queue._priority, *self._queue._non_priority]


class FrameCache(MessageCache):
    """The messages of the last seconds: one frame of each, that all peers share, and who was given it."""

    def __init__(self, window_size: int, history_size: int) -> None:
        super().__init__(window_size, history_size)
        self.frames: dict[bytes, rpc_pb2.RPC] = {}  # by message id
        self._given: dict[bytes, set[ID]] = {}

    def put(self, msg: rpc_pb2.Message) -> None:
        message_id = default_msg_id_fn(msg)
        if message_id not in self.frames:
            self.frames[message_id], self._given[message_id] = rpc_pb2.RPC(publish=[msg]), set()
            super().put(self.frames[message_id].publish[0])

    def shift(self) -> None:
        """A heartbeat has passed: forget the oldest messages."""
        super().shift()
        for message_id in self.frames.keys() - self.msgs.keys():
            del self.frames[message_id], self._given[message_id]

    def give(self, peer: ID, message_id: bytes, queue: RpcQueue) -> None:
        """Have a message wait in the peer's queue, unless it is unknown, was given to the peer, or has no room."""
        frame = self.frames.get(message_id)
        if frame is not None and peer not in self._given[message_id] and queue.push(frame):
            self._given[message_id].add(peer)

    def forget(self, peer: ID) -> None:
        """Its connection is gone, and with that what waited for it."""
        for peers in self._given.values():
            peers.discard(peer)
