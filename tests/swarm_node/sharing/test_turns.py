"""Dialogues of several turns between nodes: what is shared, admitted, refused by name, and found to be payload."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from swarm_node.config import RewardsConfig, RolloutsConfig
from swarm_node.rollouts import collect
from swarm_node.sharing.gate import Gate
from swarm_node.tasks.one_turn import prompt_digest
from swarm_node.tasks.second_try import LESS, MORE
from swarm_node.tasks.taskset import has_signal, load_tasks, slot_key, slot_place
from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.codec import sign_batch
from swarm_protocol.manifest import Manifest, ManifestTask
from swarm_protocol.messages import SharedRollout, SharedTurn
from swarm_protocol.topics import epoch_at
from tests.support.gossip_room import PEER, World, edit, rejected


@pytest.fixture
def world(starter: Any) -> World:
    tasks = load_tasks(["second_try"], RewardsConfig())
    return World(starter, tasks, Manifest(name="test", tasks=[ManifestTask(env="second_try")]))


def assigned(world: World) -> Task:
    """The task of PEER's next slot, and answers to it: the right one, one that is too low, one that is too high."""
    epoch, world.slot = epoch_at(world.time), world.slot + 1
    which = world.manifest.swarm_id, PEER.peer_id, epoch, world.slot
    task = world.tasks.at(slot_place(*which), slot_key(*which))
    return msgspec.structs.replace(task, slot=(epoch, world.slot))


def group(world: World, *dialogues: list[str]) -> Group:
    """A scored group of dialogues, in which `$` is the right answer, `<` a lower and `>` a higher one."""
    task = assigned(world)
    right = int(task.answer or "")
    said = {"$": str(right), "<": str(right - 1), ">": str(right + 1)}
    prompt_ids = world.policy.encode(world.tasks.prompt(task))
    held = [world.tasks.dialogue(task, "", prompt_ids, world.policy.after_answer) for _ in dialogues]
    for each, texts in zip(held, dialogues, strict=True):
        for text in texts:
            answer = said.get(text, text)
            ids = world.policy.encode_completion(answer, True)
            assert ids
            each.answer(Turn(ids, [-0.5] * len(ids), True, answer))
        assert each.over
    return Group(task, prompt_ids, world.tasks.judged(held, ""), created=world.time)


@pytest.mark.parametrize("with_tokens", [True, False])
def test_dialogues_arrive_as_they_were_held(world: World, with_tokens: bool) -> None:
    world.config = world.config.model_copy(update={"token_ids": with_tokens})
    sent = group(world, ["$"], ["<", "$"], [">", ">"], ["hm", "$"])
    receiver = world.receiver()
    receiver.take(sign_batch(world.batch(sent), PEER))
    assert receiver.admit() == 1, rejected(receiver)
    (found,) = world.admitted
    assert [r.reward for r in found.rollouts] == [1.0, 1.0, 0.0, 1.0]
    assert [r.spoken for r in found.rollouts] == [r.spoken for r in sent.rollouts]
    assert [r.transcript for r in found.rollouts] == [r.transcript for r in sent.rollouts]
    assert MORE in found.rollouts[1].transcript and LESS in found.rollouts[2].transcript
    assert [bool(r.logprobs) for r in found.rollouts] == [with_tokens] * 4


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (["<"], "lacks an answer"),
        (["$", "$"], "goes on after its end"),  # a second turn after a right first one
        (["<", "<", "$"], "goes on after its end"),
    ],
)
def test_a_turn_too_many_or_too_few_is_refused_by_name(world: World, turns: list[str], told: str) -> None:
    batch = world.batch(group(world, ["$"], ["<", ">"]))
    (shared,) = batch.groups
    texts = {"$": shared.rollouts[0].turns[0].text, "<": shared.rollouts[1].turns[0].text}
    odd = SharedRollout([SharedTurn(texts[turn], True) for turn in turns], [prompt_digest(MORE)] * (len(turns) - 1))
    receiver = world.receiver()
    receiver.take(sign_batch(edit(batch, [*shared.rollouts, odd]), PEER))
    assert receiver.admit() == 0 and rejected(receiver) == {"turns": 1.0}
    assert told in " ".join(map(str, world.said))


@pytest.mark.parametrize("heard", [[], [prompt_digest(LESS)], [bytes(16)]])
def test_another_environments_text_is_refused_by_name(world: World, heard: list[bytes]) -> None:
    batch = world.batch(group(world, ["$"], ["<", ">"]))
    (shared,) = batch.groups
    first, second = shared.rollouts
    assert (first.heard, second.heard) == ([], [prompt_digest(MORE)])
    receiver = world.receiver()
    receiver.take(sign_batch(edit(batch, [first, SharedRollout(second.turns, heard)]), PEER))
    assert receiver.admit() == 0 and rejected(receiver) == {"prompt": 1.0}
    assert "the environment says something else here" in " ".join(map(str, world.said))


def test_dialogues_that_ended_early_are_not_sent(world: World) -> None:
    made = group(world, ["$"], ["<", ">"])
    made.rollouts[1].cut = True
    publisher = world.publisher()
    publisher.publish([made])
    publisher.flush()
    assert world.sent == [] and publisher.metrics()["swarm/unsent/turns"] == 1.0


def test_a_limit_holds_for_all_turns_together(world: World) -> None:
    limits = msgspec.structs.replace(world.manifest.limits, max_answer_tokens=5)
    batch = world.batch(made := group(world, ["$"], ["<", "hm, I think it is $"]))
    assert made.rollouts[1].num_tokens > 5
    world.manifest = msgspec.structs.replace(world.manifest, limits=limits)
    receiver = world.receiver()
    receiver.take(sign_batch(msgspec.structs.replace(batch, swarm=world.manifest.swarm_id), PEER))
    receiver.admit()
    assert rejected(receiver).keys() <= {"cap", "assignment"} and not world.admitted


def test_own_dialogues_pass_admission(world: World) -> None:
    """What a node samples of the environment, another one admits, with the same rewards."""
    config = RolloutsConfig(groups=8, group_size=8, max_new_tokens=16)
    found = collect(world.policy, lambda n: [assigned(world) for _ in range(n)], world.tasks, config, "seed").groups
    taught = [each for each in found if has_signal(each.rollouts)]
    assert any(len(r.turns) == 2 for each in taught for r in each.rollouts) and len(taught) > 2
    receiver = world.receiver()
    for each in taught:
        each.created = world.time
        receiver.take(sign_batch(world.batch(each), PEER))
    assert receiver.admit() == len(taught), rejected(receiver)
    sent = {each.task.name: [(r.reward, r.spoken) for r in each.rollouts] for each in taught}
    assert {g.task.name: [(r.reward, r.spoken) for r in g.rollouts] for g in world.admitted} == sent


@pytest.mark.parametrize(("at", "carries"), [((0,), True), ((1,), True), ((), False)])
def test_payload_is_found_in_each_turn(world: World, at: tuple[int, ...], carries: bool) -> None:
    """A text behind the number earns nothing in either turn."""
    texts = ["<", "$"]
    made = group(world, ["<", ">"], texts)
    rollout = made.rollouts[1]
    turns = []
    for number, turn in enumerate(rollout.turns):
        text = f"{turn.text} zq" if number in at else turn.text
        ids = world.policy.encode_completion(text, True) or []
        turns.append(Turn(ids, [], True, text, turn.context, turn.asked))
    made.rollouts[1] = Rollout(turns, rollout.extracted, rollout.rewards, rollout.reward, rollout.correct)
    plain = [len(turn.token_ids) for turn in rollout.turns]

    def logprobs(groups: Any) -> list[list[list[float]]]:
        return [
            [
                [
                    -9.0 if i >= n - 1 and i < len(t.token_ids) - 1 else -0.1
                    for t, n in zip(r.turns, plain, strict=True)
                    for i in range(len(t.token_ids))
                ]
                for r in g.rollouts
            ]
            for g in groups
        ]

    gate = Gate(world.policy, world.tasks, logprobs)
    assert gate.payloads([made], [[False, True]]) == [[False, carries]]


def test_two_turns_are_sampled_by_name(world: World) -> None:
    """The same seed gives the same dialogues; each dialogue draws its second answer for itself."""
    config = RolloutsConfig(groups=4, group_size=8, max_new_tokens=8)
    drawn = world.tasks.sample(random.Random(0), 4)
    one, other = (collect(world.policy, lambda n: drawn[:n], world.tasks, config, "seed").groups for _ in range(2))
    assert [[r.spoken for r in g.rollouts] for g in one] == [[r.spoken for r in g.rollouts] for g in other]
    second = [r.turns[1].text for g in one for r in g.rollouts if len(r.turns) == 2]
    assert len(second) > 8 and len(set(second)) > 4
