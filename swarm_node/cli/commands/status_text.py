"""The text of `swarm-node status`, from its JSON document."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from swarm_node.averaging.skipping import happened
from swarm_node.cli.commands.status_tables import card_table, exchange_table, reasons_in
from swarm_node.config.figures import WORDS
from swarm_node.observability.cut_off import cut_off
from swarm_node.observability.ending import WORDS as WORDS_OF_END
from swarm_node.observability.progress import volume
from swarm_node.observability.reasons import UNUSED
from swarm_node.observability.refusals import SHORT_ID, RefusalRow
from swarm_node.observability.restarts import restarts
from swarm_node.observability.samples import without_middle
from swarm_node.observability.tally import ENOUGH_ROUNDS
from swarm_node.observability.usage import usage_of
from swarm_node.observability.worth import Worth, mixed_words, theirs_words, worth_in_brief, worth_lines
from swarm_node.say import own_command
from swarm_protocol.errors import printable

PARTNERS_LISTED = 8  # most averaging partners that are named
REJECTED = "swarm/rejected/"  # start of the names of counts of groups that were left out
UNSENT = "swarm/unsent/"  # start of the names of counts of own groups that were not sent
USUAL = {"zero", "rate", "slot", "queue"}  # reasons for that which need no remedy
WORST = 5  # most sources of refusals that are named
NAMED = 4  # most members that are named on one line
SAID_CHARS = 300  # most characters of a sentence of the log
HOUR_S = 3600.0
"""A start's traffic an hour is not told before: in its first minutes it gets model, questions and cards."""
STATUS_FRESH_S = 30.0  # a run whose status is older than this stands still or has ended
Part = Callable[[Mapping[str, Any]], Iterator[str]]


def status_lines(found: Mapping[str, Any], now: float, verbose: bool = False) -> Iterator[str]:
    """The document `found` as text, at Unix time `now`. Of a run: what it does, whether it learned, what the swarm
    gave, what it takes and what to do next. `verbose`: also its place in the network, each member and all counts."""
    if found["run"]:
        yield f"run        {found['run']}{_when(found, now)}{'' if verbose else ' (-v says more)'}"
    for part in _parts(found, verbose):
        yield from part(found)


def _parts(found: Mapping[str, Any], verbose: bool) -> list[Part]:
    """The parts of the text after the first line of a run, in their order."""
    if not found["run"]:
        return [_swarm, _count, _cards]
    own = [_saved, _paused, _round, _last_said, _held_out]
    if found["swarm"] is None:
        return [*own, _uses, _alone, _next]
    if verbose:
        exchange = [_averaging, _averaging_in_full, _crew, _start, _traffic_in_full, _not_used, _refused_in_full]
        return [*own, _worth_in_full, _uses, _swarm, _node, *exchange, _restarts, _count, _peers, _any_link, _next]
    return [*own, _worth, _uses, _swarm, _averaging, _crew, _start, _refused, _restarts, _members, _link, _next]


def _ended(found: Mapping[str, Any]) -> bool:
    """Whether what is known of a run is of a start that has ended."""
    return bool(found["run"]) and (found["end"] in ("ended", "killed") or found["starting"])


def _saved(found: Mapping[str, Any]) -> Iterator[str]:
    """What is left of a run that was killed, or that ended before its last rounds were saved."""
    end, saved, metrics = found["end"], found["saved_round"], found["metrics"]
    if end not in ("ended", "killed") or not metrics or found["crew"]:  # each stage of a crew is saved by itself
        return
    lost = metrics["round"] - (saved or 0)
    if saved is None:
        yield "saved      nothing yet: the run has to begin anew"
    elif lost > 0 or end == "killed":
        again = f"; {lost:,} round{' has' if lost == 1 else 's have'} to be trained again"
        yield f"saved      up to round {saved:,}{again if lost > 0 else ': nothing is lost'}"


def _paused(found: Mapping[str, Any]) -> Iterator[str]:
    if found["paused"]:
        yield f"paused     {found['paused']}"


def _round(found: Mapping[str, Any]) -> Iterator[str]:
    if metrics := found["metrics"]:
        cut, crew = cut_off(metrics), found["crew"]
        led = ", the last that this node led" if crew and 0 not in crew["held"] else ""
        reward = _reward(found["reward"], metrics.get("reward"))
        yield f"round      {metrics['round']:,}{led}{reward}{cut and f'; {cut}'}"


def _last_said(found: Mapping[str, Any]) -> Iterator[str]:
    """What a run that has done no round yet is at, or how it ended."""
    if said := found.get("said"):
        so_far = "none was done; it ended: " if found["end"] == "ended" else "none yet; it said last: "
        yield f"round      {so_far}{printable(without_middle(said, SAID_CHARS))}"


def _worth(found: Mapping[str, Any]) -> Iterator[str]:
    yield from _labelled("worth", [*worth_in_brief(_worth_of(found)), *_mixed(found)])


def _worth_in_full(found: Mapping[str, Any]) -> Iterator[str]:
    alone = "what the swarm gave, a run alone can tell: `local` with the same tasks, then `compare` (docs/swarm.md)"
    gave, mixed = worth_lines(_worth_of(found), summary=True), list(_mixed(found))
    yield from _labelled("worth", [*gave, *mixed, *([alone] if mixed else [])])


def _mixed(found: Mapping[str, Any]) -> Iterator[str]:
    """That others' weights are part of a run's own."""
    averaging = found["swarm"].get("averaging") or {}
    exchanges, began_with = averaging.get("exchanges", 0), averaging.get("began_with", "")
    if exchanges or began_with:
        yield mixed_words(exchanges, began_with)


def _uses(found: Mapping[str, Any]) -> Iterator[str]:
    usage = usage_of(found["metrics"] or {})
    if usage is not None and not _ended(found) and not found["paused"]:
        yield f"uses       {usage.words()}, {usage.disk / 1e6:,.0f} MB of the disk"


def _alone(found: Mapping[str, Any]) -> Iterator[str]:
    yield "swarm      none: this run trains alone"


def _swarm(found: Mapping[str, Any]) -> Iterator[str]:
    status = found["swarm"]
    yield f"swarm      {' '.join(filter(None, [status.get('swarm_name'), status['swarm'][:16]]))}"


def _link(found: Mapping[str, Any]) -> Iterator[str]:
    if not _ended(found):
        yield from _any_link(found)


def _any_link(found: Mapping[str, Any]) -> Iterator[str]:
    """The link by which others join, or joined the last start."""
    if link := found["swarm"].get("link"):
        yield f"join link  {link}"


def _reward(tenths: Mapping[str, Any] | None, last: float | None) -> str:
    if tenths is None or tenths["rounds"] == 1:
        return "" if last is None else f"; its reward {last:.3f}"
    at_first, now, rounds = f"{tenths['first']:.3f}", f"{tenths['last']:.3f}", tenths["rounds"]
    if rounds < ENOUGH_ROUNDS:
        return f"; reward {at_first} in the first, {now} in the last of {rounds} rounds: too few for a trend"
    return f"; reward {at_first} -> {now}, first and last tenth of {rounds:,} rounds"


def _held_out(found: Mapping[str, Any]) -> Iterator[str]:
    """Held-out figures of the run and, beside pass@1, those that members declare."""
    held, best, theirs = found["held_out"], found["best"], theirs_words(_worth_of(found))
    parts = []
    if held is not None:
        before, now = (None if held[when] is None else f"{held[when]:.3f}" for when in ("before", "now"))
        change = " -> ".join(filter(None, [before, now]))
        parts.append(f"{change} after round {held['round']:,}" if now else f"{change} before training")
    if best is not None and (held is None or held["round"] != best["round"]):
        parts.append(f"best {best['value']:.3f} after round {best['round']:,}")
    figure = (held or best or {"figure": "pass_1"})["figure"]
    if theirs and figure == "pass_1":
        parts.append(theirs)
    if parts:
        yield f"held-out   {WORDS[figure]} {'; '.join(parts)}"
    yield from _labelled("worse", (held or {}).get("worse", []))


def _node(found: Mapping[str, Any]) -> Iterator[str]:
    """The place of the run's node in the network."""
    if "peer" in (status := found["swarm"]):
        yield f"node       {status.get('name') or 'node'}, peer {status['peer']}"
        yield f"reached at {', '.join(status['addresses']) or 'no address: this node only dials'}"


def _start(found: Mapping[str, Any]) -> Iterator[str]:
    """What a run exchanged with its swarm in its latest start."""
    status, ended = found["swarm"], _ended(found)
    seconds = status["time"] - status["since"] if "since" in status else 0.0
    if parts := [*_traffic(status.get("traffic"), seconds), *_groups(status, ended)]:
        long = f"{_long(seconds)}: " if seconds > 0 else ""
        yield f"{'last' if ended else 'this'} start {long}{'; '.join(parts)}"


def _groups(status: Mapping[str, Any], ended: bool) -> Iterator[str]:
    """How many groups came and went."""
    if "received" in status:
        came, admitted = (_number(status["received"], f"swarm/groups_{name}") for name in ("received", "admitted"))
        waiting = _number(status["received"], "swarm/groups_waiting")
        rest = "" if waiting == "0" else f", {waiting} {'never examined' if ended else 'not examined yet'}"
        yield f"{came} groups received, {admitted} admitted{rest}"
    if "sent" in status:
        yield f"{_number(status['sent'], 'swarm/groups_sent')} sent"


def _not_used(found: Mapping[str, Any]) -> Iterator[str]:
    """Groups that were not sent or not used, which says nothing against their senders."""
    sent = found["swarm"].get("sent", {})
    if unsent := reasons_in(sent, UNSENT):
        usual = all(name.removeprefix(UNSENT) in USUAL for name, n in sent.items() if name.startswith(UNSENT) and n)
        alike = "no answer was right, so they teach nothing (`swarm-node samples` shows them)"
        plain = f"{'nothing to do, ' if usual else ''}this node used them all the same"
        nothing_right = sent.get(f"{UNSENT}zero") and (found["metrics"] or {}).get("reward") == 0
        yield f"not sent   {unsent}: {alike if nothing_right else plain}"
    if reasons := _rejected(found["swarm"], unused=True):
        yield f"not used   {reasons}"


def _refused(found: Mapping[str, Any]) -> Iterator[str]:
    """What was refused, or else by whom the most came."""
    reasons = _rejected(found["swarm"], unused=False)
    yield from [f"refused    {reasons}"] if reasons else _sources(found["swarm"], "refused", 1)


def _refused_in_full(found: Mapping[str, Any]) -> Iterator[str]:
    """What was refused, and by whom it came."""
    reasons = _rejected(found["swarm"], unused=False)
    if reasons:
        yield f"refused    {reasons}"
    yield from _sources(found["swarm"], "" if reasons else "refused", WORST)


def _rejected(status: Mapping[str, Any], unused: bool) -> str:
    """Groups that were `unused`, or else refused, by reason."""
    counts = status.get("received", {}).items()
    return reasons_in({name: n for name, n in counts if (name.removeprefix(REJECTED) in UNUSED) == unused}, REJECTED)


def _count(found: Mapping[str, Any]) -> Iterator[str]:
    """How many members there are."""
    status = found["swarm"]
    if not status.get("connected", True):
        where = ", ".join(status["asked"][:3])
        tried = "something answers at {}, but not as a peer: `swarm-node doctor` may say why"
        yield f"members    unknown: {(tried if status['answered'] else 'nobody answered at {}').format(where)}"
        return
    here = _here(status)
    training = sum(figures.get("trains", True) for figures in here.values())
    others = f" other{'' if len(here) == 1 else 's'}" if found["run"] else ""
    of_them = "" if training == len(here) else f", {training or 'none'} of them training"
    yield f"members    {len(here)}{others}{of_them}{' when this run ended' if _ended(found) else ''}"


def _members(found: Mapping[str, Any]) -> Iterator[str]:
    """How many members there are, and the names of those that a run uses most."""
    for count in _count(found):
        yield f"{count}{_named_members(_here(found['swarm']))}"


def _peers(found: Mapping[str, Any]) -> Iterator[str]:
    """A table of what a run exchanged with each member."""
    if peers := _all(found["swarm"]):
        yield from exchange_table(peers, _ended(found))


def _cards(found: Mapping[str, Any]) -> Iterator[str]:
    """A table of the members of a swarm, and what they say of themselves."""
    if peers := _all(found["swarm"]):
        yield from card_table(peers, found.get("kinds", []))


def _all(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """All peers that are known, with whether one is `absent`: silent in the crew."""
    absent = (status.get("crew") or {}).get("absent", [])
    return {peer: figures | {"absent": peer in absent} for peer, figures in status.get("peers", {}).items()}


def _here(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Those of them that are there."""
    peers = _all(status)
    return {peer: figures for peer, figures in peers.items() if figures.get("present") and not figures["absent"]}


def _named_members(peers: Mapping[str, Mapping[str, Any]]) -> str:
    """The members whose groups were used, by name, those with most first; empty if there is none."""
    used = {peer: figures["used"] for peer, figures in peers.items() if figures.get("used")}
    most = sorted(used.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{peers[peer].get('name') or '…' + peer[-SHORT_ID:]} {groups:,}" for peer, groups in most[:NAMED]]
    return f"; groups used: {', '.join(named)}{', …' if len(most) > NAMED else ''}" if named else ""


def _next(found: Mapping[str, Any]) -> Iterator[str]:
    """Commands that make sense now."""
    run = shlex.quote(found["run"])
    way = found["goes_on"] if found["end"] in ("ended", "killed") else None  # one process at a time may write
    commands = [way["command"]] if way and way["command"] else []
    if found["metrics"]:
        commands.append(f"samples {run}")
    if found["in_use"]:
        pauses = found["metrics"] and not found["crew"]  # others of a crew would wait for its stage
        commands.append(f"{'unpause' if found['paused'] else 'pause' if pauses else 'stop'} {run}")
    to_go_on = [f"to go on, {printable(way['instead'])}"] if way and way["instead"] else []
    yield from _labelled("next", [*(f"{own_command()} {command}" for command in commands), *to_go_on])


def _labelled(label: str, lines: Iterable[str]) -> Iterator[str]:
    """The lines, the first after `label`."""
    for number, line in enumerate(lines):
        yield f"{'' if number else label:10} {line}"


def _worth_of(found: Mapping[str, Any]) -> Worth:
    """What the swarm gave the run; a status of another version says nothing of it."""
    try:
        return msgspec.convert((found["swarm"] or {}).get("worth") or {}, Worth)
    except msgspec.ValidationError:
        return Worth()


def _sources(status: Mapping[str, Any], label: str, most: int) -> Iterator[str]:
    """The `most` sources with most refusals, one line each, the first after `label`."""
    found = msgspec.convert(status.get("refused", []), list[RefusalRow])
    for i, row in enumerate(found[:most]):
        yield f"{'' if i else label:10} {row.says}, from {row.place()}, last {_ago(status['time'] - row.last)}"
    if len(found) > most:
        others = sum(row.count for row in found[most:])
        yield f"{'':10} {others:,} from {len(found) - most} others"


def _ago(seconds: float) -> str:
    return f"{_long(seconds)} ago"


def _long(seconds: float) -> str:
    seconds = max(0.0, seconds)
    units = (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0), ("days", 86400.0, math.inf))
    unit, length, _ = next(each for each in units if seconds < each[2])
    return f"{seconds / length:.0f} {unit}"


def _crew(found: Mapping[str, Any]) -> Iterator[str]:
    crew, now = found["swarm"].get("crew"), found["swarm"]["time"]
    if not crew:
        return
    state = "whole" if crew["whole"] else "not whole"
    lead = "nobody leads yet" if crew["lead"] is None else f"led by {_named(crew['lead'])}"
    yield f"crew       {crew['name']}: {crew['count']} stages, {state}, {lead}, {crew['updates']} updates"
    for stage, seat in enumerate(crew["stages"]):
        missing = seat.get("missing")
        here = "this node" if stage in crew["held"] else _named(seat)
        if missing:
            taker = missing["taker"]
            by = "held by nobody" if taker is None else f"being rebuilt by {_named(taker)}"
            here = f"lost {max(0.0, now - missing['since']):.0f} s ago, {by}"
        yield f"           stage {stage} (layers {seat['layers'][0]}-{seat['layers'][1]}): {here}"
    kept = ", ".join(f"stage {stage} after update {updates}" for stage, updates in crew["replicas"].items())
    yield f"           spares {crew['spares']}; replicas kept here: {kept or 'none'}"
    if recovered := ", ".join(f"{n} by {way}" for way, n in crew["recovered"].items()):
        yield f"           stages built so far: {recovered}"


def _named(peer: Mapping[str, str]) -> str:
    return f"{peer['name'] or 'a peer'} (…{peer['peer'][-SHORT_ID:]})"


def _averaging(found: Mapping[str, Any]) -> Iterator[str]:
    figures = found["swarm"].get("averaging")
    if not figures:
        return
    done = f"weights averaged {figures['exchanges']} times, {figures['bytes'] / 1e6:.2f} MB sent"
    if last := figures["last"]:
        before = _ago(found["swarm"]["time"] - last["time"])
        done += f", last with {last['with']} {before.replace('ago', 'before the end') if _ended(found) else before}"
    yield f"averaging  {done}"


def _averaging_in_full(found: Mapping[str, Any]) -> Iterator[str]:
    """How weights are averaged, with whom, and why they were not."""
    figures = found["swarm"].get("averaging")
    if not figures:
        return
    yield f"           {figures['method']}, {figures['when']}, {figures['codec']}; cohort {figures['cohort']}"
    if not _ended(found):
        partners = sorted(figures["partners"].values())
        listed = ", ".join(partners[:PARTNERS_LISTED]) + (", …" if len(partners) > PARTNERS_LISTED else "")
        yield f"           partners here: {f'{len(partners)}, {listed}' if partners else 'none'}"
    for kind, text in (("skipped", "skipped"), ("refused", "refused to others in this start")):
        if reasons := reasons_in(figures[kind], "", happened):
            yield f"           {text}: {reasons}"


def _when(found: Mapping[str, Any], now: float) -> str:
    status = found["swarm"]
    age = max(0.0, now - status["time"]) if status else None
    if end := found["end"]:
        ago = "" if found["heard"] is None else f" {_ago(now - found['heard'])}"
        return f", {WORDS_OF_END[end].replace(' {ago}', ago)}"
    if found["starting"]:
        seen = "" if age is None else f"; what follows is as of {_ago(age)}, when it last ended"
        return f", starting (loading){seen}"
    if age is not None and age > STATUS_FRESH_S:
        return f", as of {_ago(age)}: it stands still"
    return "" if found["paused"] else ", running"


def _traffic(traffic: Mapping[str, float] | None, seconds: float) -> Iterator[str]:
    """The traffic of the `seconds` of a start; 0 = its time is not known."""
    if traffic is not None:
        inward, outward = traffic.get("bytes_in", 0.0), traffic.get("bytes_out", 0.0)
        hourly = f", {volume(3600 * (inward + outward) / seconds)} an hour" if seconds >= HOUR_S else ""
        yield f"{volume(inward)} in, {volume(outward)} out{hourly}"


def _traffic_in_full(found: Mapping[str, Any]) -> Iterator[str]:
    """Messages and connections of a start."""
    if (traffic := found["swarm"].get("traffic")) is None:
        return
    parts = [f"{_number(traffic, 'messages_in')} messages in, {_number(traffic, 'messages_out')} out"]
    parts.append(f"gossip connections: {_number(traffic, 'connections/gossip')}")
    yield f"{'':10} {'; '.join(parts)}"


def _restarts(found: Mapping[str, Any]) -> Iterator[str]:
    """How often the processes of the network were started again, and why the last time."""
    status = found["swarm"]
    yield from _labelled("network", list(restarts(status.get("traffic") or {}, status.get("restarted") or {})))


def _number(figures: Mapping[str, float], name: str) -> str:
    return f"{figures.get(name, 0):.0f}"
