"""Cohorts whose members know different things: slow weights come together again, and no member misleads others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from swarm_node.averaging.cohort_averager import MOST_BEHIND, CohortAverager
from swarm_node.averaging.outer_step import DiLoCo
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import PROTOCOL_VERSION
from swarm_protocol.tensors import AVERAGE_METHOD, AverageHead, decode_head, encode_head
from swarm_protocol.transports.base import Outgoing
from tests.support.averaging_cohort import COHORT, SWARM, Cohort, Trainee


def group(n: int, **options: Any) -> Cohort:
    """A cohort with the usual timeout: it must recover without waiting for it."""
    usual = {"method": "diloco", "codec": "8bit", "overlap": False, "timeout_s": 60.0}
    return Cohort(n, **{**usual, **options})


def slow_apart(cohort: Cohort) -> float:
    slow = torch.stack([torch.cat(trainee.averager.slow) for trainee in cohort.trainees])
    return float((slow - slow[0]).abs().max())


def skipped(cohort: Cohort, reason: str) -> int:
    return sum(trainee.averager.counts[f"skipped/{reason}"] for trainee in cohort.trainees)


@pytest.mark.parametrize("codec", ["8bit", "4bit"])
def test_a_newcomer_takes_over_slow_weights_too(codec: str) -> None:
    """The other member was alone until then: both are in round 0."""
    cohort = group(1, codec=codec)
    first = cohort.trainees[0]
    cohort.run(60)
    late = cohort.join()
    late.late_join.seek()
    cohort.trainees.append(late)
    for seconds in range(60):
        cohort.at(seconds, partial(cohort.announce, first))
    cohort.run(60)
    assert late.fetched and late.fetched[0].version > 30
    assert skipped(cohort, "codec") and not skipped(cohort, "absent")
    assert min(cohort.exchanges()) >= 4
    assert slow_apart(cohort) < 1e-6


@pytest.mark.parametrize(("resumed", "overlap"), [([0], False), ([3], False), ([0, 3], True)], ids=str)
def test_resumed_and_new_members_find_together(resumed: list[int], overlap: bool) -> None:
    """Some members know that slow weights differ, the others do not, and they begin at different times."""
    cohort = group(4, overlap=overlap)
    for i, trainee in enumerate(cohort.trainees):
        trainee.step_s = (1.0, 2.7, 0.3, 1.0)[i]
        if i in resumed:
            tensors, numbers = trainee.averager.state_dict()
            slow = {name: x + 0.1 * (1 + i) if "slow" in name else x.clone() for name, x in tensors.items()}
            trainee.averager.load_state_dict(slow, numbers)
            for tensor in trainee.weights.values():
                tensor += 0.1 * (1 + i)
    cohort.run(70)
    assert skipped(cohort, "codec"), "some did not know"
    assert min(cohort.exchanges()) >= 3
    assert slow_apart(cohort) < 1e-6


def test_members_a_round_ahead_are_followed_at_once() -> None:
    """Otherwise both wait for each other, give up, and are as far apart as before."""
    cohort = group(5, codec="float32", timeout_s=20.0)
    ahead = cohort.trainees[3:]
    for trainee in ahead:
        assert isinstance(trainee.averager, CohortAverager)
        trainee.averager._number = 1
        trainee.step_s = 1.5  # the others are in round 0 when they begin
    cohort.run(50)
    assert skipped(cohort, "late") and not skipped(cohort, "absent")
    assert min(cohort.exchanges()) >= 2


def test_members_with_different_outer_steps_do_not_average() -> None:
    cohort = group(2)
    a, b = (trainee.averager for trainee in cohort.trainees)
    assert isinstance(a, CohortAverager) and isinstance(b, CohortAverager)
    b.outer = DiLoCo(learning_rate=0.3, momentum=0.9)
    cohort.run(100)
    assert cohort.exchanges() == [0, 0]
    assert a.counts["skipped/group"] >= 1


# --------------------------------------------------------------------- hostile members


def call(cohort: Cohort, victim: Trainee, **changes: Any) -> RemoteProtocolError:
    """The refusal of peer 1's call of `victim` with a changed head."""
    liar = cohort.trainees[1].transport.peer_id
    fields = {"round": 0, "fragment": 0, "phase": 1, "group": "0" * 16, **changes}
    head = AverageHead(PROTOCOL_VERSION, SWARM, COHORT, liar, victim.transport.peer_id, **fields)
    refuse = Outgoing(encode_head(head))
    done = cohort.trainees[1].transport.exchange(
        victim.transport.peer_id, AVERAGE_METHOD, refuse, lambda head, size: lambda piece: None, 5.0
    )
    cohort.run(0.5)
    error = done.exception()
    assert isinstance(error, RemoteProtocolError)
    return error


class Liar:
    """Peer 1 of two: never trains, and answers each call with the same refusal; but is honest for `honest_s`."""

    def __init__(self, reason: str = "early", detail: str = "", timeout_s: float = 5.0, honest_s: float = 0.0) -> None:
        self.cohort = group(2, fragments=2, timeout_s=timeout_s)
        self.cohort.run(honest_s)
        self.victim, liar = self.cohort.trainees
        liar.dead = True
        self.refusal = RemoteProtocolError(reason, detail)
        self.calls: list[AverageHead] = []
        """Heads of the victim's calls; a call is repeated as long as it is refused."""
        liar.transport.accept(AVERAGE_METHOD, self.refuse)

    def refuse(self, peer: str, head: bytes, size: int) -> Any:
        self.calls.append(decode_head(head, AverageHead))
        raise self.refusal

    @property
    def rounds(self) -> list[int]:
        """Rounds in which the victim has called, each once."""
        return list(dict.fromkeys(head.round for head in self.calls))

    def call(self, **changes: Any) -> str:
        return call(self.cohort, self.victim, **changes).reason


def test_no_member_leads_others_far_ahead() -> None:
    liar = Liar()
    assert liar.call(round=2**53 - 2) == "early"
    liar.cohort.run(30)
    assert MOST_BEHIND <= liar.rounds[0] and liar.rounds[-1] <= MOST_BEHIND + 10, "it did follow, so far"


@pytest.mark.parametrize(("changes", "reason"), [({"phase": 0}, "schema"), ({"fragment": 1}, "fragment")], ids=str)
def test_a_round_is_believed_of_valid_heads_only(changes: dict[str, int], reason: str) -> None:
    liar = Liar(timeout_s=60.0)
    assert liar.call(round=8, **changes) == reason
    liar.cohort.run(17)
    assert liar.rounds == [0]
    assert liar.call(round=8) == "early"
    liar.cohort.run(17)
    assert liar.rounds == [0, 8]


def test_a_call_in_another_codec_ends_the_round() -> None:
    """The caller gives the round up as well, before its time is over."""
    liar = Liar(timeout_s=60.0, honest_s=50.0)
    assert min(liar.cohort.exchanges()) >= 2, "both fragments were averaged"
    for codec in ("int8", "int8", "float32"):  # the second is of the other fragment, of which nothing was missed
        liar.cohort.run(17)
        last = liar.calls[-1]
        assert last.codec == codec
        place = {"round": last.round, "fragment": last.fragment, "phase": last.phase, "group": last.group}
        assert liar.call(**place, codec="float32" if codec == "int8" else "int8") == "codec"
    assert liar.victim.averager.counts["skipped/codec"] == 3


@pytest.mark.parametrize(("detail", "followed"), [("7", 7), ("²", 1), ("٣", 1), ("-3", 1), ("9" * 16, 1)], ids=ascii)
def test_only_plain_numbers_are_rounds(detail: str, followed: int) -> None:
    """A peer refuses a call as late with a made-up detail; round 1 begins when the time of round 0 is over."""
    liar = Liar("late", detail)
    liar.cohort.run(30)
    assert liar.rounds[:2] == [0, followed]
