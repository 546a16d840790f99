"""Sources of a lost stage, and the sentences about them."""

from __future__ import annotations

import pytest

from swarm_node.pipeline.recovery.sources import elsewhere, rank_sources, tell
from swarm_protocol.crew import MAX_STAGE_SOURCES, Holding, Kept, Source
from swarm_protocol.messages import PROTOCOL_VERSION, CrewCard, PeerCard

RED, BLUE = "0ed" * 5 + "0", "b1e" * 5 + "0"
"""Ids of two crews."""
EVEN = ((0, 2), (2, 4), (4, 6), (6, 8))


def live(*stages: int, updates: int = 40) -> Holding:
    return Holding(live=tuple(Kept(stage, updates) for stage in stages))


def ways(found: list[Source]) -> list[str]:
    return [source.way for source in found]


CREW = {"p0": live(0), "p1": live(1), "p3": live(3)}


def test_a_middle_stage_is_its_neighbours_mean():
    assert rank_sources(2, EVEN, CREW, 40) == [Source("mean", ("p1", "p3"), (1, 3), 40), Source("base")]


def test_everything_there_is_best_first():
    holdings = {
        **CREW,
        "p1": Holding(
            live=(Kept(1, 40),), replicas=(Kept(2, 39),), checkpoints=(Kept(2, 30), Kept(1, 30), Kept(2, 20))
        ),
        "p3": Holding(live=(Kept(3, 40),), replicas=(Kept(2, 25),)),
        "p9": live(2),
    }
    found = rank_sources(2, EVEN, holdings, 40, others=lambda stage: {"q": 12, "r": 70, "s": 99} if stage == 2 else {})
    assert found == [
        Source("live", ("p9",), updates=40),
        Source("replica", ("p1",), updates=39),
        Source("cohort", ("q",), updates=12),
        Source("cohort", ("r",), updates=70),
        Source("mean", ("p1", "p3"), (1, 3), 40),
        Source("snapshot", ("p1",), updates=30),
        Source("replica", ("p3",), updates=25),
        Source("base"),
    ]  # the older checkpoint would be one too many
    assert len(found) == MAX_STAGE_SOURCES
    nearly = rank_sources(2, EVEN, holdings, 40, fresh=10)
    assert ways(nearly) == ["live", "replica", "snapshot", "mean", "replica", "snapshot", "base"]
    assert [source.updates for source in nearly] == [40, 39, 30, 40, 25, 20, 0]


def test_how_old_a_replica_may_be():
    holdings = {**CREW, "p1": Holding(live=(Kept(1, 40),), replicas=(Kept(2, 36),))}
    assert ways(rank_sources(2, EVEN, holdings, 40, fresh=4)) == ["replica", "mean", "base"]
    assert ways(rank_sources(2, EVEN, holdings, 40, fresh=3)) == ["mean", "replica", "base"]


def test_an_old_replica_follows_another_crews_stage():
    for updates, first in ((30, ["replica", "cohort"]), (29, ["cohort", "replica"])):
        holdings = {**CREW, "p1": Holding(live=(Kept(1, 40),), replicas=(Kept(2, updates),))}
        found = rank_sources(2, EVEN, holdings, 40, others=lambda stage: {"q": 40}, usual=10, fresh=100)
        assert ways(found) == [*first, "mean", "base"]


def test_a_file_newer_than_replicas_comes_first():
    for file, first in ((37, ["snapshot", "replica"]), (35, ["replica", "snapshot"]), (38, ["snapshot", "replica"])):
        holdings = {**CREW, "p1": Holding((Kept(1, 40),), (Kept(2, 36),)), "me": Holding(checkpoints=(Kept(2, file),))}
        found = rank_sources(2, EVEN, holdings, 40, others=lambda stage: {"q": 40}, usual=10, fresh=100)
        assert ways(found) == [*first, "cohort", "mean", "base"]


def test_sources_newer_than_the_crew_come_last():
    newer = Holding(replicas=(Kept(2, 50),), checkpoints=(Kept(2, 60), Kept(2, 30)))
    found = rank_sources(2, EVEN, {**CREW, "me": newer}, 40, fresh=100)
    assert [(source.way, source.updates) for source in found] == [
        ("snapshot", 30),
        ("mean", 40),
        ("snapshot", 60),
        ("replica", 50),
        ("base", 0),
    ]
    early = {peer: live(*(kept.stage for kept in holding.live), updates=1) for peer, holding in CREW.items()}
    assert ways(rank_sources(2, EVEN, {**early, "me": newer}, 1, fresh=100))[0] == "mean"
    ahead = Holding(replicas=(Kept(2, 41),))  # its update was made a moment before the others'
    assert ways(rank_sources(2, EVEN, {**CREW, "me": ahead}, 40)) == ["replica", "mean", "base"]


def test_ends_are_copied_from_trained_neighbours_only():
    holdings = {"p1": live(1), "p2": live(2)}
    assert ways(rank_sources(0, EVEN, holdings, 40)) == ["base"]
    assert rank_sources(0, EVEN, holdings, 40, plus=True)[0] == Source("copy", ("p1",), (1,), 40)
    assert rank_sources(3, EVEN, holdings, 40, plus=True)[0] == Source("copy", ("p2",), (2,), 40)
    assert ways(rank_sources(0, EVEN[:3], holdings, 40, plus=True)) == ["base"]  # too few stages to swap both ends


@pytest.mark.parametrize("spans", [((0, 3), (3, 4), (4, 6)), ((0, 2), (2, 4), (4, 7)), ((0, 1), (1, 3), (3, 4))])
def test_stages_of_other_sizes_cannot_stand_in(spans):
    assert ways(rank_sources(1, spans, {"p0": live(0), "p2": live(2)}, 40)) == ["base"]


def test_two_lost_neighbours_have_no_mean():
    crew = {"p0": live(0), "p3": Holding(live=(Kept(3, 40),), checkpoints=(Kept(1, 20), Kept(2, 20)))}
    assert ways(rank_sources(1, EVEN, crew, 40)) == ["snapshot", "base"]
    assert ways(rank_sources(2, EVEN, crew, 40)) == ["snapshot", "base"]


def test_before_the_first_update_nothing_is_lost():
    crew = {peer: live(*(kept.stage for kept in holding.live), updates=0) for peer, holding in CREW.items()}
    assert ways(rank_sources(2, EVEN, crew, 0)) == ["base"]
    assert ways(rank_sources(2, EVEN, {}, 0)) == ["base"]


def test_a_restarted_crew_takes_its_last_common_checkpoint():
    holdings = {
        "a": Holding(checkpoints=(Kept(0, 30), Kept(0, 20))),
        "b": Holding(checkpoints=(Kept(1, 20), Kept(1, 10))),
    }
    assert [source.updates for source in rank_sources(0, EVEN[:2], holdings, 0)] == [20, 30, 0]
    assert [source.updates for source in rank_sources(1, EVEN[:2], holdings, 0)] == [20, 10, 0]
    recalled = {peer: Holding(replicas=(Kept(0, 30),), checkpoints=one.checkpoints) for peer, one in holdings.items()}
    found = rank_sources(0, EVEN[:2], recalled, 0, others=lambda stage: {"q": 99})
    assert ways(found) == ["snapshot", "snapshot", "replica", "replica", "cohort", "base"]
    assert found[0].updates == 20  # whatever is newer of one stage only


def test_a_copy_is_something_to_lose():
    assert ways(rank_sources(1, EVEN, {"p2": Holding(replicas=(Kept(1, 30),))}, 0)) == ["replica", "base"]


def test_the_same_stage_of_another_crew():
    def card(crew: str, seats: tuple[int, ...], stages: tuple[int, int], architecture: str = "a" * 16, count: int = 4):
        shown = CrewCard(crew, architecture, count, seats)
        return PeerCard(PROTOCOL_VERSION, "0" * 64, 0.0, "n", ["trainer"], policy_version=7, stages=stages, crew=shown)

    members = {
        "same": card(BLUE, (2,), (4, 5)),
        "two": card(BLUE, (2, 3), (4, 7)),
        "mine": card(RED, (2,), (4, 5)),
        "other layers": card(BLUE, (2,), (3, 5)),
        "other stage": card(BLUE, (1,), (2, 3)),
        "other model": card(BLUE, (2,), (4, 5), "b" * 16),
        "other count": card(BLUE, (2,), (4, 5), count=5),
        "alone": PeerCard(PROTOCOL_VERSION, "0" * 64, 0.0, "n", ["trainer"], policy_version=7),
    }
    assert elsewhere(members, RED, "a" * 16, 4, (4, 6), 2) == {"same": 7, "two": 7}


@pytest.mark.parametrize(
    ("source", "updates", "sentence"),
    [
        (Source("live", ("p" * 20,)), 40, "stage 2 handed over by peer …pppppppp; nothing is lost"),
        (Source("replica", ("abcdefgh",)), 40, "rebuilt from the replica that peer …abcdefgh kept; nothing is lost"),
        (Source("replica", ("abcdefgh",)), 39, "lost: its last update"),
        (
            Source("cohort", ("abcdefgh",)),
            77,
            "of another crew; lost: what it learned since the two crews last averaged",
        ),
        (
            Source("mean", ("a", "b"), (1, 3)),
            40,
            "stage 2 rebuilt as the mean of stages 1 and 3, weighted with their gradient norms (CheckFree)",
        ),
        (Source("copy", ("a",), (1,)), 40, "rebuilt as a copy of stage 1"),
        (Source("snapshot", ("a",)), 30, "from the checkpoint after update 30; lost: its last 10 updates"),
        (Source("base"), 0, "stage 2 begins with the base model; lost: all that it learned in 40 updates"),
    ],
)
def test_sources_are_told_in_words(source, updates, sentence):
    assert sentence in tell(2, source, updates, 40)


def test_a_beginning_loses_nothing():
    assert tell(2, Source("base"), 0, 0) == "stage 2 begins with the base model; nothing is lost"
    assert "and a fresh adapter; lost" in tell(2, Source("base"), 0, 1, adapters=True)
