"""Sentences that come up again and again."""

from __future__ import annotations

from swarm_protocol.transports.reports import FIRST_S, LONGEST_S, MAX_SENTENCES, Reports


class Told:
    """A `Reports`, its clock and what it passed on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sentences: list[str] = []
        self.reports = Reports(self.sentences.append, lambda: self.now)

    def times(self, sentence: str, seconds: float, every: float = 10.0) -> list[float]:
        """When it is passed on, in seconds from the first time, if it comes up all the time."""
        began, passed = self.now, []
        while self.now < began + seconds:
            before = len(self.sentences)
            self.reports(sentence)
            if len(self.sentences) > before:
                passed.append(self.now - began)
            self.now += every
        return passed


def test_the_same_is_told_ever_more_rarely() -> None:
    times = Told().times("p2pd does not start", 5 * LONGEST_S)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0.0 and gaps[0] == FIRST_S
    assert all(b == min(2 * a, LONGEST_S) for a, b in zip(gaps, gaps[1:], strict=False))
    assert gaps[-1] == LONGEST_S


def test_what_changed_is_told_at_once() -> None:
    told = Told()
    told.times("it does not start: no memory", FIRST_S)
    told.reports("it does not start: no disk")
    assert told.sentences[-1] == "it does not start: no disk"


def test_times_and_object_addresses_are_no_change() -> None:
    told = Told()
    for i in range(9):
        told.reports(f"p2pd: 2025/01/01 10:00:0{i} failed: <Future at 0x7f{i}>")
    assert len(told.sentences) == 1


def test_returning_faults_are_told_at_once() -> None:
    told = Told()
    told.times("gone", 4 * LONGEST_S)
    told.now += LONGEST_S + 1.0
    assert told.times("gone", FIRST_S + 10.0) == [0.0, FIRST_S]


def test_it_remembers_so_many() -> None:
    told = Told()
    for i in range(3 * MAX_SENTENCES):
        told.reports(f"fault {i}")
    assert len(told.sentences) == 3 * MAX_SENTENCES
    told.reports(f"fault {2 * MAX_SENTENCES}")  # the first of those that it remembers
    assert len(told.sentences) == 3 * MAX_SENTENCES
    told.reports(f"fault {2 * MAX_SENTENCES - 1}")
    assert len(told.sentences) == 3 * MAX_SENTENCES + 1
