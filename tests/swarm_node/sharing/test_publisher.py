"""What leaves a node: only what teaches, only what receivers take, no faster than the swarm allows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from swarm_node.config import SharingConfig
from swarm_node.errors import UserError
from swarm_node.sharing.publisher import FLUSH_S, FULL_BYTES
from swarm_node.tasks.judging.texts import normalise
from swarm_node.types import Sampling
from swarm_protocol.codec import SIGNED_HEAD_BYTES, verify_batch
from swarm_protocol.limits import EPOCH_SECONDS, MAX_ADDRESS_CHARS, MAX_BATCH_BYTES, MAX_ROUND_S
from swarm_protocol.messages import SharedRollout
from tests.support.gossip_room import ME, NOW, PEER, World, manifest


def opened(world: World):
    return [verify_batch(data, world.manifest.swarm_id)[1] for data in world.sent]


def shared(world: World):
    return [group for batch in opened(world) for group in batch.groups]


def test_a_group_travels_as_name_texts_and_flags(world: World) -> None:
    group = world.group(["$", "wrong"], policy_version=7)
    group.rollouts[1].turns[0].finished = False
    publisher = world.publisher()
    publisher.publish([group])
    ((sender, batch),) = [verify_batch(data, world.manifest.swarm_id) for data in world.sent]
    (sent,) = batch.groups
    assert sender == PEER.peer_id and batch.created == NOW
    assert (batch.fingerprint, batch.tokenizer) == (world.policy.fingerprint, world.policy.tokenizer_hash)
    assert sent.task == group.task.name and (sent.epoch, sent.slot) == group.task.slot and sent.policy_version == 7
    assert sent.rollouts == [SharedRollout.of(group.task.answer, True), SharedRollout.of("wrong", False)]
    assert group.task.question.encode() not in world.sent[0]
    assert publisher.metrics() == {"swarm/groups_sent": 1.0, "swarm/bytes_sent": len(world.sent[0])}


def test_the_prompt_digest_is_that_of_the_split(world: World) -> None:
    from hashlib import sha256

    from swarm_node.tasks.one_turn import prompt_digest

    for text in ("What is 1 + 1?", "  cafe\u0301 \n au\tlait ", ""):
        assert prompt_digest(text) == sha256(normalise(text).encode()).digest()[:16]


def test_token_ids_ride_along_only_if_asked(world: World) -> None:
    world.config = SharingConfig(token_ids=True)
    group = world.group(["$", "12"])
    world.publisher().publish([group])
    ((one, _),) = [g.rollouts for g in shared(world)]
    (first,) = one.turns
    assert first.token_ids == group.rollouts[0].token_ids
    assert np.frombuffer(first.logprobs, "<f2").tolist() == group.rollouts[0].logprobs


@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("zero", lambda w: w.group(["no", "neither"])),
        ("slot", lambda w: w.group(task=msgspec.structs.replace(w.group().task, slot=None))),
        ("cap", lambda w: w.group(["$", "x" * 101])),
        ("cap", lambda w: w.group(["$", "x" * 91])),
        ("cap", lambda w: w.group(["$"] + ["x"] * 4)),
    ],
)
def test_groups_receivers_would_refuse_stay_here(world: World, reason: str, make) -> None:
    world.manifest = manifest(max_text_chars=100, max_rollouts=4, max_answer_tokens=90)
    publisher = world.publisher()
    publisher.publish([make(world)])
    publisher.flush()
    assert world.sent == []
    assert publisher.metrics() == {
        "swarm/groups_sent": 0.0,
        "swarm/bytes_sent": 0.0,
        f"swarm/unsent/{reason}": 1.0,
    }


def test_a_group_too_large_for_batches_stays_here(world: World) -> None:
    world.manifest = manifest(max_rollouts=40, max_answer_tokens=16_384)
    publisher = world.publisher()
    publisher.publish([world.group(["$"] + ["é" * 8000] * 39)])
    assert world.sent == [] and publisher.metrics()["swarm/unsent/size"] == 1


def test_fast_rounds_share_batches_slow_ones_do_not(world: World) -> None:
    publisher = world.publisher()
    for _ in range(8):
        publisher.publish([world.group()])
        world.time += 0.25
    assert [len(batch.groups) for batch in opened(world)] == [1, 4]
    assert [batch.sequence for batch in opened(world)] == [1, 2]
    publisher.flush()
    assert len(shared(world)) == 8
    for _ in range(3):
        world.time += 2
        publisher.publish([world.group()])
    assert [len(batch.groups) for batch in opened(world)] == [1, 4, 3, 1, 1, 1]


def test_full_batches_leave_at_once_within_the_limit(world: World) -> None:
    world.manifest = manifest(max_answer_tokens=16_384)
    publisher = world.publisher()
    publisher.publish([world.group()])
    publisher.publish([world.group(["$"] + ["x" * 16_000] * 8) for _ in range(10)])
    publisher.publish([world.group() for _ in range(70)])
    publisher.flush()
    assert all(len(data) <= MAX_BATCH_BYTES for data in world.sent)
    assert all(len(batch.groups) <= 64 for batch in opened(world))
    assert len(world.sent) >= 5 and len(shared(world)) == 81 == len({g.slot for g in shared(world)})


def test_over_the_rate_the_newest_are_kept(world: World) -> None:
    world.manifest = manifest(groups_per_minute=20)
    publisher = world.publisher()
    groups = [world.group() for _ in range(30)]
    publisher.publish(groups)
    assert [g.slot for g in shared(world)] == [g.task.slot[1] for g in groups[-9:]]
    assert publisher.metrics()["swarm/unsent/rate"] == 21
    for wait, sent in ((30, 4), (30, 9), (60 + 30, 13)):  # half of a minute's at once, the rest evenly
        world.time += wait
        before = publisher.metrics()["swarm/groups_sent"]
        publisher.publish([world.group() for _ in range(30)])
        assert publisher.metrics()["swarm/groups_sent"] - before == sent


def test_a_fast_node_is_never_silent_for_long(world: World) -> None:
    world.manifest = manifest(groups_per_minute=100)
    publisher = world.publisher()
    sent = []
    for _ in range(180):
        before = publisher.metrics()["swarm/groups_sent"]
        publisher.publish([world.group() for _ in range(4)])
        sent.append(publisher.metrics()["swarm/groups_sent"] - before)
        world.time += 1
    assert all(any(sent[i : i + 5]) for i in range(175)), "each five seconds something"
    assert all(sum(sent[start : start + 60]) <= 90 for start in (0, 60, 120)), "of a minute no more than receivers take"


def test_nothing_leaves_beyond_the_bytes_per_minute(world: World) -> None:
    world.manifest = manifest(bytes_per_minute=10_000)
    publisher = world.publisher()
    for _ in range(100):
        publisher.publish([world.group(["$", "x" * 200])])
        world.time += 1
    metrics = publisher.metrics()
    assert metrics["swarm/bytes_sent"] <= 10_000 * 2  # of two minutes of the clock
    assert metrics["swarm/groups_sent"] > 10 and metrics["swarm/unsent/rate"] > 10


def test_a_batch_names_some_addresses_of_its_sender(world: World) -> None:
    direct = [f"/ip4/192.0.2.{i}/tcp/1/p2p/{PEER.peer_id}" for i in range(5)]
    relayed = [f"/ip4/192.0.2.{i}/tcp/1/p2p/{ME.peer_id}/p2p-circuit/p2p/{PEER.peer_id}" for i in range(5)]
    endless = f"/dns4/{'a' * MAX_ADDRESS_CHARS}/tcp/1/p2p/{PEER.peer_id}"
    for addresses, named in (
        ([], []),
        ([endless, *direct], direct[:4]),
        (direct[:3] + relayed, direct[:2] + relayed[:2]),
        (relayed, relayed[:2]),
    ):
        world.sent.clear()
        world.publisher(addresses=lambda addresses=addresses: addresses).publish([world.group()])
        (batch,) = opened(world)
        assert batch.addresses == named


def test_a_full_batch_has_room_for_the_longest_addresses(world: World) -> None:
    longest = f"/dns4/{'a' * (MAX_ADDRESS_CHARS - 80)}/tcp/31330/p2p/{PEER.peer_id}"
    publisher = world.publisher(addresses=lambda: [longest] * 4, config=SharingConfig(token_ids=False))
    group = world.group(["$", "x"])
    group.rollouts[1].turns[0].text = "x" * world.manifest.limits.max_answer_chars
    publisher.publish([group])
    (batch,) = opened(world)
    rest = msgspec.structs.replace(batch, groups=[])
    assert SIGNED_HEAD_BYTES + FULL_BYTES + len(msgspec.msgpack.encode(rest)) < MAX_BATCH_BYTES
    assert batch.addresses == [longest] * 4


def test_a_full_queue_is_counted(world: World) -> None:
    publisher = world.publisher(send=lambda data: False)
    publisher.publish([world.group()])
    assert publisher.metrics() == {"swarm/groups_sent": 0.0, "swarm/bytes_sent": 0.0, "swarm/unsent/queue": 1.0}


def test_sampling_beyond_what_batches_describe_is_refused(world: World) -> None:
    with pytest.raises(UserError, match="max_new_tokens"):
        world.publisher(sampling=Sampling(20_000))


@pytest.mark.parametrize(("left_s", "sent"), [(2 * FLUSH_S, 1), (FLUSH_S / 2, 0), (-EPOCH_SECONDS, 0)])
def test_what_comes_later_than_anybody_waits_stays_here(world: World, left_s: float, sent: int) -> None:
    """A batch waits for up to a second before it leaves."""
    publisher, group = world.publisher(), world.group()
    world.time = (group.task.slot[0] + 1) * EPOCH_SECONDS + MAX_ROUND_S - left_s
    publisher.publish([group])
    publisher.flush()
    assert publisher.metrics().get("swarm/unsent/age", 0) == 1 - sent == 1 - len(world.sent)
