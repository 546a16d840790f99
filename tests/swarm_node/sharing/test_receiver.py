"""Between the wire and the pool: every reason fires, admits nothing, and never raises; floods stay bounded."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_node.config import GrpoConfig, PolicyConfig, RolloutsConfig, SharingConfig
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import PIECE_CHARS
from swarm_node.sharing import receiver as receiver_module
from swarm_node.sharing.peer_accounts import (
    FORGIVE_S,
    MAX_MINUTES,
    MAX_PEERS,
    MAX_SAID,
    MUTE_AFTER,
    MUTE_S,
    REASONS,
    Minutes,
)
from swarm_node.sharing.receiver import ADMIT_LEAST_S, ADMIT_MOST_S, Receiver
from swarm_node.types import Sampling, Score, Task
from swarm_protocol.codec import BATCH_TAG, SIGNED_HEAD_BYTES, sign_batch
from swarm_protocol.identity import Identity
from swarm_protocol.limits import CHARS_PER_TOKEN, EPOCH_SECONDS, MAX_BATCH_BYTES, MAX_CLOCK_SKEW_S, MAX_ROUND_S
from swarm_protocol.manifest import ManifestLimits
from swarm_protocol.messages import RolloutBatch, SharedRollout, SharedTurn
from tests.support.gossip_room import ME, NOW, OTHER, PEER, SAMPLING, World, edit, manifest, rejected, texts
from tests.support.panicking import KILLER, panicking_policy
from tests.support.tiny_models import save


def seal_anything(batch: RolloutBatch, identity: Identity = PEER) -> bytes:
    """Sealed without our own checks."""
    body = msgspec.msgpack.encode(batch)
    return identity.public_key + identity.sign(BATCH_TAG, body) + body


def admit(world: World, *messages: bytes, **changes) -> dict[str, float]:
    receiver = world.receiver(**changes)
    for data in messages:
        receiver.take(data)
    assert receiver.admit() == len(world.admitted)
    assert set(rejected(receiver)) <= REASONS
    return rejected(receiver)


def test_a_group_is_rebuilt_and_judged_here(world: World) -> None:
    sent = world.group(["$", "wrong", " $ "], policy_version=5)
    world.publisher().publish([sent])
    world.time += 3
    receiver = world.receiver()
    receiver.take(world.sent[0])
    assert receiver.admit() == 1
    (group,) = world.admitted
    assert group.task == sent.task and group.prompt_ids == sent.prompt_ids
    assert (group.peer, group.created, group.policy_version) == (PEER.peer_id, NOW, 5)
    assert [(r.text, r.reward, r.correct) for r in group.rollouts] == [
        (r.text, r.reward, r.correct) for r in sent.rollouts
    ]
    assert [r.token_ids for r in group.rollouts] == [r.token_ids for r in sent.rollouts]
    assert receiver.metrics() == {"swarm/groups_received": 1.0, "swarm/groups_admitted": 1.0}
    account = receiver.by_peer()[PEER.peer_id]
    assert account["staleness"] == 3 and account["bytes"] == len(world.sent[0]) and account["last_seen"] == NOW + 3
    assert account["off_policy"] == {}
    for logp in (-1.0, -2.0):
        receiver.measure({PEER.peer_id: {"logp": logp}, "a stranger": {"logp": -9.0}})
    receiver.measure({PEER.peer_id: {"ess": 0.5}})
    (account,) = receiver.by_peer().values()  # a peer that sent nothing gets no account
    assert account["off_policy"] == pytest.approx({"logp": -(0.95 * 1 + 2) / 1.95, "ess": 0.5})


@pytest.mark.parametrize("created", [NOW + MAX_CLOCK_SKEW_S, NOW - 600])
def test_the_limits_of_age_are_still_heard(world: World, created: float) -> None:
    assert admit(world, sign_batch(msgspec.structs.replace(world.batch(), created=created), PEER)) == {}
    assert len(world.admitted) == 1


def cut(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


REJECTED: dict[str, Callable[[World], bytes]] = {
    "size": lambda w: bytes(MAX_BATCH_BYTES + 1),
    "echo": lambda w: sign_batch(w.batch(identity=ME), ME),
    "signature": lambda w: cut(sign_batch(w.batch(), PEER), SIGNED_HEAD_BYTES + 9),
    "version": lambda w: seal_anything(msgspec.structs.replace(w.batch(), protocol=0)),
    "newer": lambda w: seal_anything(msgspec.structs.replace(w.batch(), protocol=9)),
    "schema": lambda w: seal_anything(msgspec.structs.replace(w.batch(), groups=[])),
    "swarm": lambda w: sign_batch(msgspec.structs.replace(w.batch(), swarm="0" * 64), PEER),
    "age": lambda w: sign_batch(msgspec.structs.replace(w.batch(), created=NOW - 601), PEER),
    "future": lambda w: sign_batch(msgspec.structs.replace(w.batch(), created=NOW + 31), PEER),
    "assignment": lambda w: sign_batch(w.batch(identity=OTHER), PEER),  # another's answers under one's own name
    "judge": lambda w: sign_batch(edit(w.batch(), kind="number", judge=1), PEER),
    "turns": lambda w: sign_batch(edit(w.batch(), [SharedRollout([SharedTurn("1", True)] * 2)] * 2), PEER),
    "prompt": lambda w: sign_batch(edit(w.batch(), prompt=bytes(16)), PEER),
    "text": lambda w: sign_batch(edit(w.batch(), texts("<eos>", "1<sep>2", "3")), PEER),
    "length": lambda w: sign_batch(edit(w.batch(), texts("1" * 17, "2" * 40, "3")), PEER),
    "zero": lambda w: sign_batch(edit(w.batch(), texts("no", "neither")), PEER),
}


@pytest.mark.parametrize("reason", REJECTED)
def test_each_reason_fires_and_admits_nothing(world: World, reason: str) -> None:
    assert admit(world, REJECTED[reason](world)) == {reason: 1.0}
    assert world.admitted == []
    if reason == "newer":  # the member says so, once
        assert world.said == []
    else:
        assert len(world.said) == 1 and f"({reason})" in world.said[0]


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("age", lambda batch: edit(batch, epoch=batch.groups[0].epoch - 62)),
        ("future", lambda batch: edit(batch, epoch=batch.groups[0].epoch + 2)),
        ("future", lambda batch: edit(batch, epoch=2**52)),
        ("assignment", lambda batch: edit(batch, slot=77)),
        ("assignment", lambda batch: edit(batch, task=msgspec.structs.replace(batch.groups[0].task, index=5))),
        ("task", lambda batch: edit(batch, task=msgspec.structs.replace(batch.groups[0].task, environment="jsonl"))),
        ("task", lambda batch: edit(batch, task=msgspec.structs.replace(batch.groups[0].task, generator="other 2"))),
        ("cap", lambda batch: edit(batch, texts("1", "2" * 200))),
        ("cap", lambda batch: edit(batch, texts("1", "2", "3", "4", "5"))),
    ],
)
def test_slots_names_and_caps_are_checked(world: World, reason: str, change) -> None:
    world.manifest = manifest(max_text_chars=199, max_rollouts=4)
    assert admit(world, sign_batch(change(world.batch()), PEER)) == {reason: 1.0}


def test_where_a_sender_is_is_heard_before_its_groups_are_judged(world: World) -> None:
    heard: list[tuple[str, list[str], int]] = []
    receiver = world.receiver(hear=lambda peer, addresses: heard.append((peer, list(addresses), len(world.admitted))))
    here = [f"/ip4/192.0.2.1/tcp/1/p2p/{PEER.peer_id}"]
    said = msgspec.structs.replace(world.batch(world.group()), addresses=here)
    silent = world.batch(world.group())
    late = msgspec.structs.replace(world.batch(world.group()), addresses=here, created=NOW - 10_000)
    for batch in (said, silent, late):
        receiver.take(sign_batch(batch, PEER))
    receiver.take(sign_batch(msgspec.structs.replace(said, sequence=9), OTHER)[:-1])  # nobody has signed that
    assert receiver.admit() == 2
    assert heard == [(PEER.peer_id, here, 0)]


def test_a_held_out_question_is_never_admitted(world: World) -> None:
    """Only what a slot seeds is accepted, and that is never held out."""
    task = world.tasks.held_out(1)[0]
    batch = edit(world.batch(), texts(task.answer or "", "no"), task=task.name)
    assert admit(world, sign_batch(batch, PEER)) == {"assignment": 1.0}


def test_a_group_repeated_in_another_batch_is_refused(world: World) -> None:
    group = world.group()
    first, second = world.batch(group), msgspec.structs.replace(world.batch(group), sequence=9, created=NOW + 1)
    receiver = world.receiver()
    for data in (sign_batch(first, PEER), sign_batch(first, PEER), sign_batch(second, PEER)):
        receiver.take(data)
        receiver.admit()
    assert len(world.admitted) == 1 and rejected(receiver) == {"duplicate": 2.0}
    for later, reason in ((800, "duplicate"), (MAX_ROUND_S, "age")):  # remembered for as long as it could be made anew
        before = rejected(receiver).get(reason, 0)
        world.time += later
        receiver.take(sign_batch(first, PEER))
        receiver.admit()
        assert len(world.admitted) == 1 and rejected(receiver)[reason] == before + 1


def test_a_slow_machine_is_heard_within_limits(world: World) -> None:
    batches = [world.batch(), world.batch()]
    receiver = world.receiver()
    for batch, wait, admitted in zip(batches, (MAX_ROUND_S, 2 * EPOCH_SECONDS), (1, 0), strict=True):
        world.time += wait
        receiver.take(sign_batch(msgspec.structs.replace(batch, created=world.time), PEER))
        assert receiver.admit() == admitted
    assert rejected(receiver) == {"age": 1.0}


def test_a_slot_is_answered_twice_and_no_more(world: World) -> None:
    """A fast machine may pass over its slots twice; one task is not repeated with ever new texts."""
    receiver, batch, other = world.receiver(), world.batch(), world.batch()
    right = batch.groups[0].rollouts[0]
    answers = [edit(batch, [right, SharedRollout.of(str(1000 + n), True)]) for n in range(20)]
    for answer in answers:
        receiver.take(sign_batch(answer, PEER))
    for _ in range(3):
        receiver.admit()
        world.time += EPOCH_SECONDS
    assert len(world.admitted) == 2 and rejected(receiver) == {"slot": 18.0}
    receiver.take(sign_batch(answers[-1], PEER))
    receiver.take(sign_batch(other, PEER))
    assert receiver.admit() == 1
    assert rejected(receiver) == {"slot": 18.0, "duplicate": 1.0} and not receiver.by_peer()[PEER.peer_id]["muted"]


def test_a_waiting_reward_holds_up_one_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a node counts waiting, not computing alone."""
    monkeypatch.setattr(receiver_module, "ADMIT_MOST_S", ADMIT_LEAST_S)

    def score(*arguments: Any) -> list[Score]:
        threading.Event().wait(2 * ADMIT_LEAST_S)
        return world.tasks.score(*arguments)

    receiver = world.receiver(score=score, spent=Receiver.__init__.__defaults__[-1])  # the clock of a node
    receiver.take(sign_batch(world.batch(*[world.group() for _ in range(3)]), PEER))
    assert receiver.admit() == 1


def test_slow_rewards_take_their_share_of_the_time(world: World) -> None:
    """Rounds of five seconds, in which groups of eight answers arrive that take a second each."""
    clock = held = 0.0

    def score(tasks: Sequence[Task], *arguments: Any) -> list[Score]:
        nonlocal clock
        clock += len(tasks)
        return world.tasks.score(tasks, *arguments)

    receiver = world.receiver(score=score, spent=lambda: clock)
    for _ in range(400):
        world.time = NOW + clock
        receiver.take(sign_batch(world.batch(world.group(["$", *"abcdefg"])), PEER))
        for _ in range(2):
            began = clock
            receiver.admit()
            assert clock - began <= 8.0 + ADMIT_MOST_S
            held += clock - began
        clock += 5.0
    assert 0.09 * clock < held < 0.11 * clock and len(world.admitted) > 20


STRANGE = {
    "letters": lambda n: ("abcdefghijklmnopqrstuvwxyz " * n)[:n],
    "digits": lambda n: "1" * n,
    "hangul": lambda n: "한" * n,
    "combining marks": lambda n: "e" + "\u0301" * (n - 1),
    "a short beginning": lambda n: ("tĠasĠyourĠfinalĠanswer".replace("Ġ", " ") * n)[: n - 999] + "🙂" * 999,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("size", [10_000, CHARS_PER_TOKEN * SAMPLING.max_new_tokens * 8])
def test_long_texts_are_refused_before_they_are_encoded(world: World, monkeypatch, kind: str, size: int) -> None:
    encoded = []

    class Counted:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def __getattr__(self, name):
            return getattr(self.tokenizer, name)

        def __call__(self, text, **options):
            encoded.append(len(text))
            return self.tokenizer(text, **options)

    data = sign_batch(edit(world.batch(), [SharedRollout.of(STRANGE[kind](size), True)] * 16), PEER)
    monkeypatch.setattr(world.policy, "tokenizer", Counted(world.policy.tokenizer))
    sampling = Sampling(SAMPLING.max_new_tokens * 8)
    assert admit(world, data, sampling=sampling) == {"length": 1.0}
    prompt, *answers = encoded
    assert sum(answers) < 16 * 4 * PIECE_CHARS


def test_an_answer_beyond_the_swarms_length_offends(world: World) -> None:
    """An answer too long for this node alone is not: peers may sample longer ones than it does."""
    world.manifest = manifest(max_answer_tokens=100)
    receiver = world.receiver()
    ids = [SharedRollout.of("1", True, [1] * n, bytes(2 * n)) for n in (100, 101)]
    for identity, size, long, reason in ((OTHER, 800, ids[0], "length"), (PEER, 801, ids[1], "cap")):
        for rollouts in ([SharedRollout.of("x" * size, True)] * 2, [long, SharedRollout.of("x" * 700, True)]):
            for _ in range(MUTE_AFTER // 2):
                receiver.take(sign_batch(edit(world.batch(identity=identity), rollouts), identity))
        receiver.admit()
        assert receiver.by_peer()[identity.peer_id]["rejected"] == {reason: MUTE_AFTER}
    muted = {peer: account["muted"] for peer, account in receiver.by_peer().items()}
    assert muted == {PEER.peer_id: True, OTHER.peer_id: False}


def test_admission_stops_when_its_time_is_used(world: World) -> None:
    """A flood of what is dear to examine takes a tenth of the time, and waits."""
    clock = [0.0]

    def score(*args):
        clock[0] += 0.03
        return world.tasks.score(*args)

    receiver = world.receiver(score=score, spent=lambda: clock[0])
    receiver.take(sign_batch(world.batch(*(world.group() for _ in range(10))), PEER))
    for elapsed, admitted in ((0.1, 1), (0.6, 2), (0.0, 0), (3600, 7)):
        clock[0] += elapsed
        assert receiver.admit() == admitted
        now = receiver.totals()
        assert now["swarm/groups_received"] == now["swarm/groups_admitted"] + now["swarm/groups_waiting"] == 10
    assert rejected(receiver) == {}


def test_old_messages_use_no_present_quota(world: World) -> None:
    """Somebody says an honest peer's last minutes again, to a node that has just started."""
    world.manifest = manifest(groups_per_minute=20)
    old, fresh = [], []
    for minute in range(9):
        said = fresh if minute == 8 else old
        said += [sign_batch(world.batch(*(world.group() for _ in range(5))), PEER) for _ in range(3)]
        world.time += EPOCH_SECONDS * (minute < 8)
    world.time += 1
    receiver = world.receiver()
    for data in [*fresh, *old]:
        receiver.take(data)
    receiver.admit()
    assert all(group.created == NOW + 8 * EPOCH_SECONDS for group in world.admitted[:15])
    while receiver.admit():
        pass
    assert rejected(receiver) == {} and len(world.admitted) == 9 * 15
    created = [group.created for group in world.admitted]
    assert created == sorted(created, reverse=True)
    receiver.take(sign_batch(world.batch(*(world.group() for _ in range(7))), PEER))
    receiver.admit()
    assert rejected(receiver) == {"quota": 2.0}


def test_minutes_remembered_of_a_peer_are_bounded() -> None:
    minutes = Minutes(ManifestLimits(groups_per_minute=2, bytes_per_minute=1000))
    for minute in range(3 * MAX_MINUTES):
        assert [minutes.take(NOW + 60 * minute, 100) for _ in range(3)] == [True, True, False]
    assert len(minutes.used) == MAX_MINUTES
    assert not minutes.take(NOW, 100), "a minute that was forgotten would begin anew"
    assert not minutes.take(NOW + 60 * 3 * MAX_MINUTES, 1001)


def test_rewards_are_this_nodes_own(world: World) -> None:
    """Nothing in a batch speaks of rewards or truth; what a scorer here says is what counts."""

    def only_long(tasks, prompts, completions):
        assert all(prompt.endswith("<sep>") for prompt in prompts)
        return [Score(None, {"long": float(len(c) > 3)}, float(len(c) > 3), False) for c in completions]

    batch = edit(world.batch(), texts("1", "12345"))
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    for group in body["groups"]:
        group |= {"reward": 9.0, "rewards": [9.0, 9.0], "answer": "1", "prompt_text": "what?"}
    data = msgspec.msgpack.encode(body)
    admit(world, PEER.public_key + PEER.sign(BATCH_TAG, data) + data, score=only_long)
    (group,) = world.admitted
    assert [r.reward for r in group.rollouts] == [0.0, 1.0] and group.advantages is None


def test_unfit_rollouts_are_left_out_of_their_group(world: World) -> None:
    batch = world.batch()
    right = batch.groups[0].rollouts[0]
    cut_short = [SharedRollout.of("1" * 16, False), SharedRollout.of("", False)]
    batch = edit(batch, [right, *texts("1" * 16, "<pad>", "9"), *cut_short])
    assert admit(world, sign_batch(batch, PEER)) == {}
    kept = [(r.text, r.finished) for r in world.admitted[0].rollouts]
    assert kept == [(right.turns[0].text, True), ("9", True), ("1" * 16, False)]


def test_a_prompt_that_leaves_no_room_leaves_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(world.policy), "max_positions", 2)
    assert admit(world, sign_batch(world.batch(), PEER)) == {"length": 1.0}


def test_token_ids_must_match_tokenizer_and_text(world: World) -> None:
    world.config = SharingConfig(token_ids=True)
    batch = world.batch(world.group(["$", "12"]))
    right, wrong = batch.groups[0].rollouts
    one, two, eos = world.policy.encode_completion("12", True)
    odd = [*world.policy.encode_completion("1", False), *world.policy.encode_completion("2", True)]

    def ids_of(turn: SharedTurn, tokenizer: str = batch.tokenizer) -> tuple[list[int], list[float]]:
        world.admitted.clear()
        sent = msgspec.structs.replace(edit(batch, [right, SharedRollout([turn])]), tokenizer=tokenizer)
        admit(world, seal_anything(sent))
        return world.admitted[0].rollouts[1].token_ids, world.admitted[0].rollouts[1].logprobs

    good = SharedTurn("12", True, odd, b"\x00\xb8" * len(odd))
    assert ids_of(good) == (odd, [-0.5] * len(odd))
    assert ids_of(good, "0" * 16)[1] == []
    replace = msgspec.structs.replace
    for lie in (
        replace(good, token_ids=[one, one, eos]),
        replace(good, token_ids=[one, two]),
        replace(good, token_ids=[one, two, 2**30]),
        replace(good, token_ids=[one, eos, two, eos]),
        replace(good, token_ids=[]),
    ):
        assert ids_of(lie) == ([one, two, eos], [])
    for numbers in (b"", b"\x00", b"\x00\x7e" * 3, b"\x00\x38" * 3):  # none, half a number, NaN, above 0
        assert ids_of(replace(good, logprobs=numbers)) == (odd, [])


def test_another_family_and_tokenizer_make_no_difference(world: World, tmp_path: Path) -> None:
    """A Llama's answers are trained on by a GPT-NeoX with other tokens; token ids that came along are not used."""
    save("gpt_neox", tmp_path)
    here = load_policy(PolicyConfig(model=str(tmp_path)), RolloutsConfig(max_new_tokens=16), lambda line: None)
    there = world.policy
    assert here.family != there.family and here.tokenizer_hash != there.tokenizer_hash
    world.config = SharingConfig(token_ids=True)
    data = sign_batch(world.batch(world.group(["$", "12", "one plus two"])), PEER)
    assert admit(world, data, policy=here) == {}
    (group,) = world.admitted
    assert group.prompt_ids == here.encode(group.task.question)
    for rollout in group.rollouts:
        assert rollout.token_ids == here.encode_completion(rollout.text, True) and rollout.logprobs == []
        assert here.decode(rollout.token_ids) == rollout.text
    assert group.rollouts[2].token_ids != there.encode_completion("one plus two", True)
    group.advantages = [1.0, -0.5, -0.5]
    learned = Trainer(here, GrpoConfig(), SAMPLING).step([group])
    assert learned["grad_norm"] > 0


def test_refusals_of_scorer_and_pool_are_counted(world: World) -> None:
    def fails(tasks, prompts, completions):
        raise ValueError("\x1b[2J cannot read that")

    assert admit(world, sign_batch(world.batch(), PEER), score=fails) == {"error": 1.0}
    assert "\x1b" not in world.said[0] and "cannot read that" in world.said[0]
    for said, reason in (("bytes", "pool"), ("balance", "balance")):
        receiver = world.receiver(add=lambda group, said=said: said)
        receiver.take(sign_batch(world.batch(), PEER))
        assert receiver.admit() == 0 and rejected(receiver) == {reason: 1.0}
        assert receiver.by_peer()[PEER.peer_id]["rejected"] == {reason: 1}


def test_an_answer_that_makes_the_tokenizer_panic_is_refused_and_the_node_goes_on(world: World) -> None:
    """Encoded, where it comes as text; decoded, where it comes as tokens."""
    planted = panicking_policy()
    receiver = world.receiver(policy=planted)
    harmless = world.batch(world.group(["$", "no"]))
    for text in (world.group(["$", KILLER]), world.group(["$", KILLER])):
        receiver.take(sign_batch(world.batch(text), PEER))
    as_text = [
        SharedRollout([msgspec.structs.replace(turn, token_ids=None) for turn in rollout.turns])
        for rollout in world.batch(world.group(["$", KILLER])).groups[0].rollouts
    ]
    receiver.take(sign_batch(edit(world.batch(world.group(["$", "no"])), as_text), PEER))
    receiver.take(sign_batch(harmless, PEER))
    world.time += 1
    assert receiver.admit() == 1 and len(world.admitted) == 1
    assert rejected(receiver) == {"error": 3.0}
    assert receiver.by_peer()[PEER.peer_id]["rejected"] == {"error": 3}
    (sentence,) = world.said
    assert "(error)" in sentence and "tokenizer" in sentence and "\n" not in sentence


def test_each_peer_has_quotas_of_its_own(world: World) -> None:
    world.manifest = manifest(groups_per_minute=10, bytes_per_minute=20_000)
    receiver = world.receiver()

    def send(identity: Identity, n: int, text: str = "no") -> None:
        for _ in range(n):
            batch = world.batch(identity=identity)
            receiver.take(sign_batch(edit(batch, [batch.groups[0].rollouts[0], *texts(text)]), identity))
        receiver.admit()

    send(PEER, 15)
    assert len(world.admitted) == 10 and rejected(receiver) == {"quota": 5.0}
    send(OTHER, 5)
    assert len(world.admitted) == 15 and rejected(receiver) == {"quota": 5.0}
    world.time += 6
    send(PEER, 3)
    assert len(world.admitted) == 15 and rejected(receiver) == {"quota": 8.0}
    world.time += 54
    send(PEER, 3)
    assert len(world.admitted) == 18 and rejected(receiver) == {"quota": 8.0}
    world.time += 120
    send(PEER, 4, "x" * 9000)
    assert rejected(receiver) == {"quota": 10.0, "length": 2.0}


def test_the_newest_groups_are_examined_first(world: World) -> None:
    world.config = SharingConfig(admit=4, foreign=4)
    receiver = world.receiver()
    groups = [world.group() for _ in range(10)]
    for group in groups:
        receiver.take(sign_batch(world.batch(group), PEER))
    slots = [g.task.slot[1] for g in groups]
    assert receiver.admit() == 4
    assert [g.task.slot[1] for g in world.admitted] == slots[:-5:-1]
    assert receiver.admit() == 4 and receiver.admit() == 2 and receiver.admit() == 0
    assert [g.task.slot[1] for g in world.admitted] == slots[::-1] and rejected(receiver) == {}
    receiver.take(sign_batch(world.batch(*(world.group() for _ in range(6))), PEER))
    assert receiver.admit() == 4 and receiver.admit() == 2 and rejected(receiver) == {}


def test_no_more_groups_are_examined_than_needed(world: World) -> None:
    world.config = SharingConfig(admit=6, foreign=6)
    examined = []

    def score(tasks, prompts, texts):
        examined.append(tasks[0].slot)
        return world.tasks.score(tasks, prompts, texts)

    receiver = world.receiver(score)
    for _ in range(8):
        receiver.take(sign_batch(world.batch(), PEER))
    useless = edit(world.batch(), texts("no", "neither"))  # it is examined, but not admitted
    receiver.take(sign_batch(useless, PEER))
    assert receiver.admit(enough=0) == receiver.admit(enough=-3) == len(examined) == 0
    assert receiver.admit(enough=2) == 2 and len(examined) == 3
    assert receiver.admit(enough=99) == 6 and len(examined) == 9
    assert rejected(receiver) == {"zero": 1.0}


def test_surplus_groups_wait_and_the_oldest_go(world: World, monkeypatch) -> None:
    monkeypatch.setattr(receiver_module, "MAX_WAITING", 5)
    world.config = SharingConfig(admit=4, foreign=4)
    receiver = world.receiver()
    groups = [world.group() for _ in range(8)]
    receiver.take(sign_batch(world.batch(*groups), PEER))
    assert receiver.admit() == 4 and rejected(receiver) == {"surplus": 3.0}
    assert receiver.admit() == 1
    assert [g.task.slot for g in world.admitted] == [g.task.slot for g in groups[:2:-1]]


def test_a_cheat_is_muted_and_heard_again(world: World) -> None:
    receiver = world.receiver()
    for _ in range(MUTE_AFTER):
        receiver.take(sign_batch(world.batch(identity=OTHER), PEER))
    receiver.admit()
    assert receiver.by_peer()[PEER.peer_id]["muted"]
    receiver.take(sign_batch(world.batch(), PEER))
    receiver.take(sign_batch(world.batch(identity=OTHER), OTHER))
    receiver.admit()
    assert rejected(receiver) == {"assignment": MUTE_AFTER, "muted": 1.0}
    assert [group.peer for group in world.admitted] == [OTHER.peer_id]
    world.time += MUTE_S
    receiver.take(sign_batch(world.batch(), PEER))
    assert receiver.admit() == 1 and not receiver.by_peer()[PEER.peer_id]["muted"]
    assert sum("is muted" in line for line in world.said) == 1


def test_a_mistake_now_and_then_is_forgiven(world: World) -> None:
    receiver = world.receiver()
    for _ in range(3 * MUTE_AFTER):
        receiver.take(sign_batch(world.batch(identity=OTHER), PEER))
        receiver.admit()
        world.time += FORGIVE_S
    assert rejected(receiver) == {"assignment": 3 * MUTE_AFTER}


def test_muting_takes_effect_within_a_batch(world: World) -> None:
    batch = world.batch(*(world.group(identity=OTHER) for _ in range(MUTE_AFTER + 5)))
    assert admit(world, sign_batch(batch, PEER)) == {"assignment": MUTE_AFTER, "muted": 5.0}


def test_honest_mistakes_never_mute(world: World) -> None:
    receiver = world.receiver()
    for _ in range(3 * MUTE_AFTER):
        for reason in ("age", "future", "zero", "length", "text", "swarm", "version"):
            receiver.take(REJECTED[reason](world))
        unknown = msgspec.structs.replace(world.group().task.name, config="0" * 16)
        receiver.take(sign_batch(edit(world.batch(), task=unknown), PEER))
    for _ in range(12):
        receiver.admit()
    assert rejected(receiver).keys() == {"age", "future", "zero", "length", "text", "swarm", "version", "task"}
    assert set(rejected(receiver).values()) == {3.0 * MUTE_AFTER}
    receiver.take(sign_batch(world.batch(), PEER))
    assert receiver.admit() == 1


def test_nobody_can_have_another_peer_muted(world: World) -> None:
    """A forged signature names nobody; a replay of what was said elsewhere is no offence."""
    receiver = world.receiver()
    forged = seal_anything(msgspec.structs.replace(world.batch(), groups=[]))
    for i in range(5 * MUTE_AFTER):
        receiver.take(cut(forged, SIGNED_HEAD_BYTES + 5 + i % 20))
        receiver.take(REJECTED["swarm"](world))
    receiver.admit()
    receiver.admit()
    assert rejected(receiver) == {"signature": 5 * MUTE_AFTER, "swarm": 5 * MUTE_AFTER}
    assert not receiver.by_peer()[PEER.peer_id]["muted"]
    assert set(receiver.by_peer()[PEER.peer_id]["rejected"]) == {"swarm"}


def test_a_flood_leaves_memory_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = world.receiver()
    noise = random.Random(0).randbytes(3000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for i in range(20_000):
        receiver.take(i.to_bytes(4, "big") + noise)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = 20_000 - rejected(receiver)["surplus"]
    assert held * (4 + len(noise)) <= receiver_module.INBOX_BYTES and held <= receiver_module.INBOX_MESSAGES
    assert after - before < 1.1 * receiver_module.INBOX_BYTES
    receiver.take(sign_batch(world.batch(), PEER))
    assert receiver.admit() == 1
    while sum((counts := rejected(receiver)).values()) < 20_000:
        receiver.admit()
    assert counts["surplus"] + counts["signature"] == 20_000
    for _ in range(1000):
        receiver.take(bytes(MAX_BATCH_BYTES))
    held = 1000 - rejected(receiver)["surplus"] + counts["surplus"]
    assert 0 < held * MAX_BATCH_BYTES <= receiver_module.INBOX_BYTES
    monkeypatch.setattr(receiver_module, "MAX_SEEN", 10)
    receiver = world.receiver()
    batches = [sign_batch(world.batch(), PEER) for _ in range(30)]
    for repeats in (0, 10):
        for data in batches:
            receiver.take(data)
        receiver.admit()
        assert rejected(receiver).get("duplicate", 0) == repeats, "the last ten are known, others are not"


def test_strangers_take_bounded_memory_and_few_words(world: World, monkeypatch) -> None:
    monkeypatch.setattr("swarm_node.sharing.peer_accounts.MAX_PEERS", 20)
    assert MAX_PEERS <= 1024 and MAX_SAID <= 200
    receiver = world.receiver()
    batch = world.batch()
    keys = [Identity.generate(i.to_bytes(32, "big")) for i in range(1, 60)]
    for key in keys:
        receiver.take(sign_batch(batch, key))
    while sum(rejected(receiver).values()) < len(keys):
        receiver.admit()
    assert rejected(receiver) == {"assignment": 59.0}
    assert len(receiver.by_peer()) == 20 and len(world.said) == 1


def test_the_same_messages_give_the_same_pool(world: World) -> None:
    messages = [REJECTED[reason](world) for reason in REJECTED] + [
        sign_batch(world.batch(identity=who), who) for who in (PEER, OTHER, PEER)
    ]
    pools, counts = [], []
    for _ in range(2):
        world.admitted.clear()
        counts.append(admit(world, *messages))
        pools.append(msgspec.json.encode(world.admitted))
    assert pools[0] == pools[1] and counts[0] == counts[1] and len(world.admitted) == 3


FRESH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""Each example clears what it uses of a fixture, and a busy machine is slow."""
any_text = st.text(max_size=60) | st.sampled_from(
    [
        "",
        "\x00",
        "\u202e$",
        "<eos>",
        "\\boxed{" * 30,
        "9" * 200,
        "1/0",
        "<answer>" * 9,
        "#### 1",
        "\U0010ffff",
        "\ufffd" * 9,
    ]
)


@settings(max_examples=150, suppress_health_check=FRESH)
@given(
    answers=st.lists(
        st.tuples(any_text, st.booleans(), st.lists(st.integers(0, 500), max_size=5) | st.none()),
        min_size=2,
        max_size=9,
    ),
    created=st.floats(0, 2**40, exclude_max=True) | st.just(NOW),
    honest=st.booleans(),
)
def test_any_valid_batch_is_admitted_or_counted(world: World, answers, created, honest) -> None:
    world.admitted.clear()
    batch = world.batch()
    right = batch.groups[0].rollouts[:1] if honest else []
    rollouts = right + [SharedRollout.of(text, done, ids, bytes(2 * len(ids or []))) for text, done, ids in answers]
    batch = msgspec.structs.replace(edit(batch, rollouts), created=created)
    receiver = world.receiver()
    receiver.take(sign_batch(batch, PEER))
    assert receiver.admit() == len(world.admitted)
    assert len(world.admitted) + sum(rejected(receiver).values()) == 1
    for group in world.admitted:
        assert all(0 < len(r.token_ids) <= 16 and max(r.token_ids) < 384 for r in group.rollouts)


@settings(max_examples=200, suppress_health_check=FRESH)
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_bytes_are_admitted_or_counted(world: World, changes) -> None:
    world.admitted.clear()
    body = bytearray(sign_batch(world.batch(), PEER)[SIGNED_HEAD_BYTES:])
    for place, value in changes:
        body[int(place * len(body))] = value
    receiver = world.receiver()
    receiver.take(PEER.public_key + PEER.sign(BATCH_TAG, bytes(body)) + bytes(body))
    receiver.admit()
    assert len(world.admitted) + sum(rejected(receiver).values()) == 1
