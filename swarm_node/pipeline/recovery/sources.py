"""Which way a lost stage is rebuilt: those that there are, best first.

    1  live       whoever still has it in memory hands it over                          exact
       replica    a neighbour's copy of it, `usual` updates old at most                 nearly so
       checkpoint   a file, likewise
    2  cohort     the same stage of another crew                                        as good, but another's
       replica    or a file that is `fresh` updates old at most
    3  mean       of the two neighbours, weighted with the norms of their gradients     CheckFree (arXiv 2506.15461)
       copy       of the neighbour that learned its work, at the ends                   CheckFree+
    4  checkpoint   an older file; or a copy in memory that is older
    5  base       the model that all began with

Pure. What a peer has is what it said last (`protocol.crew.Holding`), of the crew's run; a way may turn out to be
closed, then the next is tried. What is newer than a crew that lives is of a branch that it has left, and comes last. If
nobody has anything in memory, all stages go back to the newest update of which there are files of each. Before the
first update the base model is all there is to lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from protocol.crew import Holding, Kept, Layers, Source, Way
from protocol.lineage import AHEAD
from protocol.messages import PeerCard

PLUS_STAGES = 4
"""CheckFree+ copies the ends from this many stages on: with fewer, a neighbour's copy is kept instead."""


def sources(
    stage: int,
    spans: tuple[Layers, ...],
    holdings: Mapping[str, Holding],
    updates: int,
    *,
    others: Callable[[int], Mapping[str, int]] = lambda stage: {},
    plus: bool = False,
    usual: int = 40,
    fresh: int = 1,
) -> list[Source]:
    """Ways to come by `stage`, best first.

    spans     layers of each stage: only stages with equally many can stand in for each other
    holdings  what each living peer of the crew has; files only of stages that it takes or holds
    updates   that the crew has made
    others    stage -> peers of other crews that hold just that stage, best first -> their updates
    plus      odd microbatches go through the first two and the last two stages in swapped order
    usual     a copy that is more updates behind was not renewed for long
    fresh     weights of the stage itself that are not more updates behind are better than what is made of others
    """
    live = _of(stage, {peer: holding.live for peer, holding in holdings.items()})
    replicas = _of(stage, {peer: holding.replicas for peer, holding in holdings.items()})
    found = [Source("live", (peer,), updates=n) for peer, n in live]
    base = Source("base")
    if not updates and not any(kept.updates for holding in holdings.values() for kept in _stored(holding)):
        return [*found, base]
    lives = any(holding.live for holding in holdings.values())
    old = _old(stage, len(spans), holdings, replicas, updates if lives else None)
    new = [source for source in old if lives and updates - fresh <= source.updates <= updates + AHEAD]
    found += [source for source in new if source.updates >= updates - usual]
    cohort = [Source("cohort", (peer,), updates=n) for peer, n in list(others(stage).items())[:2]]
    found += cohort if lives else []
    found += [source for source in new if source not in found]
    found += _stand_ins(stage, spans, holdings, updates, plus)
    found += [source for source in [*old, *cohort] if source not in found]
    return [*found[:7], base]


def _stand_ins(
    stage: int, spans: tuple[Layers, ...], holdings: Mapping[str, Holding], updates: int, plus: bool
) -> list[Source]:
    """CheckFree and CheckFree+, if the neighbours live."""
    last = len(spans) - 1
    if 0 < stage < last:
        way, models = "mean", [stage - 1, stage + 1]
    elif plus and len(spans) >= PLUS_STAGES:
        way, models = "copy", [1 if stage == 0 else last - 1]
    else:
        return []
    peers = []
    for model in models:
        holders = _of(model, {peer: holding.live for peer, holding in holdings.items()})
        if not holders or _length(spans[model]) != _length(spans[stage]):
            return []
        peers.append(holders[0][0])
    return [Source("mean" if way == "mean" else "copy", tuple(peers), tuple(models), updates)]


def _old(
    stage: int, stages: int, holdings: Mapping[str, Holding], replicas: list[tuple[str, int]], updates: int | None
) -> list[Source]:
    """Checkpoints and replicas, newest first, but last what is newer than the crew (`updates`). If nobody has anything
    in memory (`None`), then first what there is of all stages after the same update."""
    files = [(peer, kept) for peer, holding in holdings.items() for kept in holding.checkpoints]
    by_stage = [{kept.updates for _, kept in files if kept.stage == s} for s in range(stages)]
    common = max(set.intersection(*by_stage), default=-1) if updates is None else -1
    mine = {(kept.updates, peer) for peer, kept in files if kept.stage == stage}
    found: list[tuple[Way, str, int]] = [("snapshot", peer, n) for n, peer in mine]
    found += [("replica", peer, n) for peer, n in replicas]
    most = math.inf if updates is None else updates + AHEAD
    found.sort(key=lambda one: (one[2] != common, one[2] > most, -one[2], one[0] == "replica", one[1]))
    return [Source(way, (peer,), updates=n) for way, peer, n in found]


def _stored(holding: Holding) -> tuple[Kept, ...]:
    return holding.replicas + holding.checkpoints


def elsewhere(
    members: Mapping[str, PeerCard], crew: str, architecture: str, stages: int, layers: Layers, stage: int
) -> dict[str, int]:
    """Peers of crews of the same policy, but of none with id `crew`, that hold just this stage -> updates behind it,
    as their cards say."""
    return {
        peer: card.policy_version
        for peer, card in members.items()
        if card.crew is not None
        and card.crew.id != crew
        and card.crew.architecture == architecture
        and card.crew.count == stages
        and stage in card.crew.held
        and card.stages is not None
        and (card.stages == (layers[0], layers[1] - 1) or (len(card.crew.held) > 1 and _within(layers, card.stages)))
    }


def tell(stage: int, source: Source, updates: int, crew_updates: int, *, adapters: bool = False) -> str:
    """What was done, and what is lost. `updates` are behind the stage as it is now, `crew_updates` behind the others.
    `adapters`: only those are trained."""
    return f"stage {stage} {_done(source, updates, adapters)}; {_lost(source, updates, crew_updates)}"


def _done(source: Source, updates: int, adapters: bool) -> str:
    peer = f"peer …{source.peers[0][-8:]}" if source.peers else "nobody"
    stages = " and ".join(map(str, source.stages))
    match source.way:
        case "live":
            return f"handed over by {peer}"
        case "replica":
            return f"rebuilt from the replica that {peer} kept"
        case "cohort":
            return f"taken from {peer} of another crew"
        case "mean":
            return f"rebuilt as the mean of stages {stages}, weighted with their gradient norms (CheckFree)"
        case "copy":
            return f"rebuilt as a copy of stage {stages}, which learned its work by swapped order (CheckFree+)"
        case "snapshot":
            return f"rebuilt from the checkpoint after update {updates}"
    return "begins with the base model" + (" and a fresh adapter" if adapters else "")


def _lost(source: Source, updates: int, crew_updates: int) -> str:
    match source.way:
        case "cohort":
            return "lost: what it learned since the two crews last averaged"
        case "mean" | "copy":
            them = "them" if len(source.stages) > 1 else "that one"
            return f"lost: what set it apart from {them}, which it learns again"
    missing = crew_updates if source.way == "base" else crew_updates - updates
    if missing <= 0:
        return "nothing is lost"
    if source.way == "base":
        return f"lost: all that it learned in {missing} update{'s' * (missing > 1)}"
    return f"lost: its last {f'{missing} updates' if missing > 1 else 'update'}"


def _of(stage: int, holdings: Mapping[str, Collection[Kept]]) -> list[tuple[str, int]]:
    """Peers that have `stage`, and its updates, newest first."""
    found = [(peer, kept.updates) for peer, all_kept in holdings.items() for kept in all_kept if kept.stage == stage]
    return sorted(found, key=_newest)


def _newest(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _length(layers: Layers) -> int:
    return layers[1] - layers[0]


def _within(layers: Layers, shown: tuple[int, int]) -> bool:
    return shown[0] <= layers[0] and layers[1] - 1 <= shown[1]
