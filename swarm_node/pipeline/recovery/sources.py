"""The sources from which a lost stage can be rebuilt, best first.

    1  live        a peer that still has it in memory                                    exact
       replica     a neighbour's copy, at most `usual` updates old                       nearly exact
       checkpoint  a file, at most `usual` updates old                                   nearly exact
    2  cohort      the same stage of another crew                                        as good, but different
       replica     or checkpoint, at most `fresh` updates old
    3  mean        of the two neighbours, weighted by the norms of their gradients       CheckFree (arXiv 2506.15461)
       copy        at an end: of the neighbour that learned its work                     CheckFree+
    4  checkpoint  or replica that is older
    5  base        the base model

This module is pure. It goes by what each peer last said it has (`swarm_protocol.crew.Holding`) of the crew's run. If a
source fails, the next one is tried. A copy that is newer than a living crew is of a branch that the crew has left, and
comes last. If no peer has any stage in memory, all stages go back to the newest update of which every stage has a file.
Before the first update only the base model is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from swarm_protocol.crew import Holding, Kept, Layers, Source, Way
from swarm_protocol.lineage import AHEAD
from swarm_protocol.messages import PeerCard

PLUS_STAGES = 4  # CheckFree+ copies the ends only with so many stages; with fewer, replicas are kept


def rank_sources(
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
    """Sources for `stage`, best first.

    spans     layers of each stage; a neighbour can replace a stage only if both have equally many
    holdings  what each living peer of the crew has; files only of stages that it takes or holds
    updates   that the crew has made
    others    stage -> peers of other crews that hold just that stage, best first, and their updates
    plus      CheckFree+: odd microbatches take another order of stages
    usual     a copy that is regularly renewed is at most so many updates old
    fresh     a copy that is at most so many updates old is better than a stage made of its neighbours
    """
    live = {peer: holding.live for peer, holding in holdings.items()}
    stored = [kept for holding in holdings.values() for kept in holding.replicas + holding.checkpoints]
    found = [Source("live", (peer,), updates=n) for peer, n in _of(stage, live)]
    base = Source("base")
    if not updates and not any(kept.updates for kept in stored):
        return [*found, base]
    lives = any(live.values())
    old = _old(stage, len(spans), holdings, updates if lives else None)
    new = [source for source in old if lives and updates - fresh <= source.updates <= updates + AHEAD]
    found += [source for source in new if source.updates >= updates - usual]
    cohort = [Source("cohort", (peer,), updates=n) for peer, n in list(others(stage).items())[:2]]
    found += cohort if lives else []
    found += [source for source in new if source not in found]
    found += _stand_ins(stage, spans, live, updates, plus)
    found += [source for source in [*old, *cohort] if source not in found]
    return [*found[:7], base]


def _stand_ins(
    stage: int, spans: tuple[Layers, ...], live: Mapping[str, Collection[Kept]], updates: int, plus: bool
) -> list[Source]:
    """CheckFree or CheckFree+, if the neighbours are held."""
    last = len(spans) - 1
    if 0 < stage < last:
        models = [stage - 1, stage + 1]
    elif plus and len(spans) >= PLUS_STAGES:
        models = [1 if stage == 0 else last - 1]
    else:
        return []
    peers, lengths = [], [end - first for first, end in spans]
    for model in models:
        holders = _of(model, live)
        if not holders or lengths[model] != lengths[stage]:
            return []
        peers.append(holders[0][0])
    return [Source("mean" if len(models) == 2 else "copy", tuple(peers), tuple(models), updates)]


def _old(stage: int, stages: int, holdings: Mapping[str, Holding], updates: int | None) -> list[Source]:
    """Checkpoints and replicas, newest first, but those that are newer than the crew last.

    updates  that the crew has made; `None` = no peer has any stage in memory. Then the newest update of which every
             stage has a file comes first.
    """
    files = {peer: holding.checkpoints for peer, holding in holdings.items()}
    replicas = {peer: holding.replicas for peer, holding in holdings.items()}
    by_stage = [{n for _, n in _of(s, files)} for s in range(stages)]
    common = max(set.intersection(*by_stage), default=-1) if updates is None else -1
    found: list[tuple[Way, str, int]] = [("snapshot", peer, n) for peer, n in set(_of(stage, files))]
    found += [("replica", peer, n) for peer, n in _of(stage, replicas)]
    most = math.inf if updates is None else updates + AHEAD
    found.sort(key=lambda one: (one[2] != common, one[2] > most, -one[2], one[0] == "replica", one[1]))
    return [Source(way, (peer,), updates=n) for way, peer, n in found]


def elsewhere(
    members: Mapping[str, PeerCard], crew: str, architecture: str, stages: int, layers: Layers, stage: int
) -> dict[str, int]:
    """Peers of other crews of the same policy that hold this stage -> its updates, as their cards say.

    crew  id of the own crew"""
    first, last = layers[0], layers[1] - 1
    return {
        peer: card.policy_version
        for peer, card in members.items()
        if card.crew is not None
        and card.crew.id != crew
        and card.crew.architecture == architecture
        and card.crew.count == stages
        and stage in card.crew.held
        and card.stages is not None
        and card.stages[0] <= first <= last <= card.stages[1]
        and (card.stages == (first, last) or len(card.crew.held) > 1)
    }


def tell(stage: int, source: Source, updates: int, crew_updates: int, *, adapters: bool = False) -> str:
    """Say what was done and what is lost.

    updates       of the stage as it is now
    crew_updates  of the other stages
    adapters      only adapters are trained
    """
    peer = f"peer …{source.peers[0][-8:]}" if source.peers else "no peer"
    stages = " and ".join(map(str, source.stages))
    missing = crew_updates - updates
    lost = "" if missing <= 0 else "its last update" if missing == 1 else f"its last {missing} updates"
    match source.way:
        case "live":
            done = f"handed over by {peer}"
        case "replica":
            done = f"rebuilt from the replica that {peer} kept"
        case "snapshot":
            done = f"rebuilt from the checkpoint after update {updates}"
        case "cohort":
            done = f"taken from {peer} of another crew"
            lost = "what it learned since the two crews last averaged"
        case "mean":
            done = f"rebuilt as the mean of stages {stages}, weighted with their gradient norms (CheckFree)"
            lost = "what set it apart from them, which it learns again"
        case "copy":
            done = f"rebuilt as a copy of stage {stages}, which learned its work by swapped order (CheckFree+)"
            lost = "what set it apart from that one, which it learns again"
        case "base":
            done = "begins with the base model" + (" and a fresh adapter" if adapters else "")
            lost = f"all that it learned in {crew_updates} update{'s' * (crew_updates > 1)}" if crew_updates else ""
    return f"stage {stage} {done}; {f'lost: {lost}' if lost else 'nothing is lost'}"


def _of(stage: int, holdings: Mapping[str, Collection[Kept]]) -> list[tuple[str, int]]:
    """Peers that have `stage`, with its updates, newest first."""
    found = [(peer, kept.updates) for peer, all_kept in holdings.items() for kept in all_kept if kept.stage == stage]
    return sorted(found, key=lambda one: (-one[1], one[0]))
