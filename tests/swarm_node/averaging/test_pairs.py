"""What a pair's exchange holds, and whom it keeps waiting."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from protocol.errors import RemoteProtocolError
from tests.swarm_node.averaging.cohort import PERIOD_S, Cohort


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def vectors(values: int) -> int:
    """Float32 tensors in memory that hold so many values or more, views of the same counted once."""
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size >= 4 * values for size in storages.values())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("codec", ["float32", "8bit", "4bit"])
@pytest.mark.parametrize("fault", ["", "gates", "sink"])
def test_between_exchanges_there_are_slow_weights_and_momentum(
    codec: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the last one ended, and without Python's collector."""

    def refuse(*arguments: object) -> None:
        raise RemoteProtocolError("gates", "refused")

    before = vectors(730)
    cohort = Cohort(2, codec=codec, clip=1.5, gates=True)
    averagers = [trainee.averager for trainee in cohort.trainees]
    for averager in averagers:
        if fault == "gates":
            monkeypatch.setattr(averager.robust, "check", refuse)
        elif fault == "sink":
            monkeypatch.setattr(averager, "_weigh", refuse)
    cohort.run(2.5 * PERIOD_S)
    for averager in averagers:
        averager._settled = 10**9  # type: ignore[attr-defined]  # no more of them
    cohort.run(5.0)
    assert not any(averager._under_way for averager in averagers)  # type: ignore[attr-defined]
    assert sum(averager.counts["skipped/gates" if fault else "exchanges"] for averager in averagers) >= 1
    assert vectors(730) - before == 2 * len(averagers)


def test_without_overlap_whoever_is_called_waits_too() -> None:
    cohort = Cohort(2, overlap=False)
    waits = {trainee.number: 0 for trainee in cohort.trainees}

    def look() -> None:
        for trainee in cohort.trainees:
            exchange = trainee.averager._under_way  # type: ignore[attr-defined]
            if exchange is not None and not exchange.ours and not exchange.done:
                waits[trainee.number] += trainee.averager.waiting()
                assert trainee.averager.waiting()
        cohort.at(0.01, look)

    look()
    cohort.run(4 * PERIOD_S)
    assert sum(waits.values()) > 0
