"""Records as they go over the wire, well formed and otherwise."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import strategies as st

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.messages import (
    PROTOCOL_VERSION,
    CrewCard,
    Declared,
    DeclaredKind,
    DeclaredUse,
    PeerCard,
    RolloutBatch,
    SharedGroup,
    SharedRollout,
    SharedSampling,
    TaskName,
)

SWARM = "5a" * 32
IDENTITY = Identity.generate(bytes(range(32)))
STRANGER = Identity.generate(bytes(range(1, 33)))

BATCH = RolloutBatch(
    protocol=PROTOCOL_VERSION,
    swarm=SWARM,
    sequence=7,
    created=1_800_000_000.5,
    fingerprint="0123456789abcdef",
    tokenizer="fedcba9876543210",
    sampling=SharedSampling(max_new_tokens=16, temperature=1.0, top_p=0.95),
    groups=[
        SharedGroup(
            task=TaskName("gcd", "0123456789abcdef", "reasoning-gym 0.1.25", seed=0, index=123_456_789),
            epoch=30_000_000,
            slot=17,
            prompt=bytes(range(16)),
            policy_version=42,
            rollouts=[
                SharedRollout.of("<answer>6</answer>", finished=True),
                SharedRollout.of("é\n\0🙂", finished=False, token_ids=[1, 2**31 - 1], logprobs=b"\0\xbc\0\xc0"),
            ],
            kind="number",
            judge=1,
        )
    ],
)
BATCH_BEFORE = msgspec.structs.replace(
    BATCH, protocol=1, groups=[msgspec.structs.replace(group, kind="", judge=0) for group in BATCH.groups]
)
"""The same as protocol 1 has it, which knows neither kinds nor a judge."""
ADDRESSES = [
    f"/ip4/203.0.113.7/tcp/31330/p2p/{IDENTITY.peer_id}",
    f"/ip4/192.0.2.1/tcp/31330/p2p/{STRANGER.peer_id}/p2p-circuit/p2p/{IDENTITY.peer_id}",
]
CARD = PeerCard(
    protocol=PROTOCOL_VERSION,
    swarm=SWARM,
    created=1_800_000_000.5,
    name="kitchen-laptop",
    roles=["trainer", "relay"],
    addresses=[f"/ip4/203.0.113.7/tcp/31330/p2p/{IDENTITY.peer_id}"],
    gossip=["/ip4/203.0.113.7/tcp/31331/p2p/12D3KooWgossip"],
    gossip_id="12D3KooWgossip",
    shards=[0, 3],
    cohort="00112233445566aa",
    family="llama",
    tokenizer="fedcba9876543210",
    policy_version=42,
    speed=1234.5,
    stages=(0, 11),
    crew=CrewCard("c0ffee0123456789", "8899aabbccddeeff", count=2, held=(0,), term=3),
)
DECLARED = Declared(
    since=1_799_990_000.0,
    version="0.1.0",
    kinds=[DeclaredKind("gcd", 640, 211), DeclaredKind("sapo/bf", 64, 0)],
    pass_1=0.4375,
    questions=200,
    used=1204,
    used_of=[DeclaredUse("1f2e3d4c5b6a7988", 700), DeclaredUse("8899aabbccddeeff", 504)],
)


def seal(body: object, tag: bytes, identity: Identity = IDENTITY) -> bytes:
    """Anything at all, correctly signed: `body` as it is if bytes, else as msgpack."""
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return identity.public_key + identity.sign(tag, data) + data


def fields(record: msgspec.Struct) -> dict[str, object]:
    """The record as the map that travels."""
    decoded: dict[str, object] = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    return decoded


def refused(decode: Callable[[], object], reasons: set[str]) -> str | None:
    """The reason that `decode` refuses for, one of `reasons`, or None if it decodes. Anything else it raises passes."""
    try:
        decode()
    except RemoteProtocolError as error:
        assert error.reason in reasons, error
        return error.reason
    return None


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with one to four short pieces replaced, and now and then cut off."""
    mutated = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(0, len(mutated) - 1)))
        mutated[position : position + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(mutated[: draw(st.integers(0, len(mutated)))] if draw(st.booleans()) else mutated)


def values() -> st.SearchStrategy[object]:
    """Whatever msgpack can carry, awkward things first."""
    awkward = st.sampled_from(
        [None, True, -1, 0, 2**31, 2**53, 2**63 - 1, 2**64 - 1, float("nan"), float("inf"), 1e308, "", "\0", "x" * 300]
    )
    leaves = awkward | st.binary(max_size=20) | st.text(max_size=20)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner))
