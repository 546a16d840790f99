"""The text of `swarm-node status`, from its JSON document."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from swarm_node.averaging.skipping import happened
from swarm_node.config.figures import WORDS
from swarm_node.observability.progress import volume
from swarm_node.observability.reasons import UNUSED, words
from swarm_node.observability.refusals import SHORT_ID, RefusalRow
from swarm_node.observability.usage import usage_of
from swarm_node.observability.worth import Worth, theirs_words, worth_in_brief, worth_lines

PARTNERS_LISTED = 8  # most averaging partners that are named
KINDS_LISTED = 8  # most kinds of task that a line names
REJECTED = "swarm/rejected/"  # start of the names of counts of groups that were left out
UNSENT = "swarm/unsent/"  # start of the names of counts of own groups that were not sent
USUAL = {"zero", "rate", "slot", "queue"}  # reasons for that which need no remedy
WORST = 5  # most sources of refusals that are named
NAMED = 4  # most members that are named on one line
STATUS_FRESH_S = 30.0  # a run whose status is older than this stands still or has ended
Cells = Callable[[Mapping[str, Any]], list[str]]


def status_lines(found: Mapping[str, Any], now: float, verbose: bool = False) -> Iterator[str]:
    """The document `found` as text, at Unix time `now`. Of a run: what it does, whether it learned, what the swarm
    gave, what it takes and what to do next. `verbose`: also its place in the network, each member and all counts."""
    status = found["swarm"]
    if found["run"]:
        yield from _run(found, now, verbose)
    if status is None:
        yield "swarm      none: this run trains alone"
    else:
        yield f"swarm      {' '.join(filter(None, [status.get('swarm_name'), status['swarm'][:16]]))}"
        if found["run"]:
            yield from _exchange(found, verbose)
        yield from _members(found, verbose)
        if status.get("link") and (verbose or not _ended(found)):
            yield f"join link  {status['link']}"
    if found["run"]:
        yield from _next(found)


def _run(found: Mapping[str, Any], now: float, verbose: bool) -> Iterator[str]:
    """What the run does, whether it learned, what the swarm gave it and what it takes."""
    metrics = found["metrics"] or {}
    more = "" if verbose or found["killed"] else " (-v says more)"
    yield f"run        {found['run']}{_when(found, now)}{more}"
    if found["killed"]:
        yield f"saved      {_saved(found['saved_round'], metrics['round'])}"
    if found["paused"]:
        yield f"paused     {found['paused']}"
    if metrics:
        yield f"round      {metrics['round']:,}{_reward(found['reward'], metrics.get('reward'))}"
    worth = _worth(found["swarm"] or {})
    yield from _held_out(found["held_out"], found["best"], theirs_words(worth))
    for number, line in enumerate(worth_lines(worth, summary=True) if verbose else worth_in_brief(worth)):
        yield f"{'' if number else 'worth':10} {line}"
    if (usage := usage_of(metrics)) is not None and not _ended(found) and not found["paused"]:
        yield f"uses       {usage.words()}, {usage.disk / 1e6:,.0f} MB of the disk"


def _ended(found: Mapping[str, Any]) -> bool:
    """Whether what is known of a run is of a start that has ended."""
    return bool(found["run"]) and (not found["in_use"] or found["starting"])


def _saved(saved: int | None, last: int) -> str:
    """What is left of a run that was killed after the round `last`."""
    if saved is None:
        return "nothing yet: `resume` begins anew"
    lost = last - saved
    again = f"; `resume` trains {lost:,} round{'' if lost == 1 else 's'} again" if lost > 0 else ": nothing is lost"
    return f"up to round {saved:,}{again}"


def _reward(tenths: Mapping[str, Any] | None, last: float | None) -> str:
    if tenths is None:
        return "" if last is None else f"; its reward {last:.3f}"
    change = f"{tenths['first']:.3f} -> {tenths['last']:.3f}"
    return f"; reward {change}, first and last tenth of {tenths['rounds']:,} rounds"


def _held_out(held: Mapping[str, Any] | None, best: Mapping[str, Any] | None, theirs: str) -> Iterator[str]:
    """Held-out figures of the run and, beside pass@1, those that members declare."""
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


def _exchange(found: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    """What a run exchanged with its swarm."""
    status, ended = found["swarm"], _ended(found)
    if verbose and "peer" in status:
        yield f"node       {status.get('name') or 'node'}, peer {status['peer']}"
        yield f"reached at {', '.join(status['addresses']) or 'no address: this node only dials'}"
    if status.get("averaging"):
        yield from _averaging(status["averaging"], status["time"], ended, verbose)
    if status.get("crew"):
        yield from _crew(status["crew"], status["time"])
    seconds = status["time"] - status["since"] if "since" in status else 0.0
    parts = [*_traffic(status.get("traffic"), seconds, verbose), *_groups(status, ended)]
    if parts:
        long = f"{_long(seconds)}: " if seconds > 0 else ""
        yield f"{'last' if ended else 'this'} start {long}{'; '.join(parts)}"
    yield from _left_out(status, verbose)


def _groups(status: Mapping[str, Any], ended: bool) -> Iterator[str]:
    """How many groups came and went."""
    if "received" in status:
        came, admitted = (_count(status["received"], f"swarm/groups_{name}") for name in ("received", "admitted"))
        waiting = _count(status["received"], "swarm/groups_waiting")
        rest = "" if waiting == "0" else f", {waiting} {'never examined' if ended else 'not examined yet'}"
        yield f"{came} groups received, {admitted} admitted{rest}"
    if "sent" in status:
        yield f"{_count(status['sent'], 'swarm/groups_sent')} sent"


def _left_out(status: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    """What was refused; if `verbose`, also by whom it came, and groups that were not sent or not used."""
    sent = status.get("sent", {})
    if verbose and (unsent := _reasons(sent, UNSENT)):
        usual = all(name.removeprefix(UNSENT) in USUAL for name, n in sent.items() if name.startswith(UNSENT) and n)
        yield f"not sent   {unsent}: {'nothing to do, ' if usual else ''}this node used them all the same"
    left_out = {name: n for name, n in status.get("received", {}).items() if name.startswith(REJECTED)}
    unused = {name: n for name, n in left_out.items() if name.removeprefix(REJECTED) in UNUSED}
    if verbose and (reasons := _reasons(unused, REJECTED)):
        yield f"not used   {reasons}"
    if refused := _reasons({name: n for name, n in left_out.items() if name not in unused}, REJECTED):
        yield f"refused    {refused}"
    if verbose or not refused:
        yield from _sources(status, "" if refused else "refused", WORST if verbose else 1)


def _members(found: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    """How many members there are, and their names; of a swarm, and if `verbose`, a table of them."""
    status, ended = found["swarm"], _ended(found)
    if not status.get("connected", True):
        where = ", ".join(status["asked"][:3])
        tried = "something answers at {}, but not as a peer: `swarm-node doctor` may say why"
        yield f"members    unknown: {(tried if status['answered'] else 'nobody answered at {}').format(where)}"
        return
    absent = (status.get("crew") or {}).get("absent", [])
    peers = {peer: figures | {"absent": peer in absent} for peer, figures in status.get("peers", {}).items()}
    here = {peer: figures for peer, figures in peers.items() if figures.get("present") and not figures["absent"]}
    training = sum(figures.get("trains", True) for figures in here.values())
    others = f" other{'' if len(here) == 1 else 's'}" if found["run"] else ""
    of_them = "" if training == len(here) else f", {training or 'none'} of them training"
    count = f"members    {len(here)}{others}{of_them}{' when this run ended' if ended else ''}"
    if found["run"] and not verbose:
        yield f"{count}{_named_members(here)}"
        return
    yield count
    if peers and found["run"]:
        titles = ["was here" if ended else "here", "updates", "received", "admitted", "used", "not used or refused"]
        yield from _table(peers, titles, _exchanged)
    elif peers:
        averaged = any(peer["cohort"] for peer in peers.values())
        says = any(peer.get("declared") for peer in peers.values())
        yield from _success(found.get("kinds", []), says)
        optional = [*(["success", "held-out"] if says else []), *(["cohort"] if averaged else [])]
        titles = ["roles", "model", "updates", "tokens/s", *optional, "address"]
        yield from _table(peers, titles, lambda figures: _member(figures, averaged, says))


def _named_members(peers: Mapping[str, Mapping[str, Any]]) -> str:
    """The members whose groups were used, by name, those with most first; empty if there is none."""
    used = {peer: figures["used"] for peer, figures in peers.items() if figures.get("used")}
    most = sorted(used.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{peers[peer].get('name') or '…' + peer[-SHORT_ID:]} {groups:,}" for peer, groups in most[:NAMED]]
    return f"; groups used: {', '.join(named)}{', …' if len(most) > NAMED else ''}" if named else ""


def _next(found: Mapping[str, Any]) -> Iterator[str]:
    """Commands that make sense now."""
    run = shlex.quote(found["run"])
    commands = [] if found["in_use"] else [f"resume {run}"]
    if found["metrics"]:
        commands.append(f"samples {run}")
    if found["in_use"]:
        commands.append(f"{'unpause' if found['paused'] else 'pause' if found['metrics'] else 'stop'} {run}")
    for number, command in enumerate(commands):
        yield f"{'' if number else 'next':10} swarm-node {command}"


def _worth(status: Mapping[str, Any]) -> Worth:
    """What the swarm gave the run; a status of another version says nothing of it."""
    try:
        return msgspec.convert(status.get("worth") or {}, Worth)
    except msgspec.ValidationError:
        return Worth()


def _success(kinds: Sequence[Mapping[str, Any]], says: bool) -> Iterator[str]:
    """Success by kind of task over all members that declare it; `says`: any member declares something."""
    if not kinds:
        yield from ["held-out   what members say of themselves, unchecked"] if says else []
        return
    listed = ", ".join(f"{row['kind']} {row['success']:.2f}" for row in kinds[:KINDS_LISTED])
    more = f" and {len(kinds) - KINDS_LISTED} more" if len(kinds) > KINDS_LISTED else ""
    yield f"success    {listed}{more}: what members say of themselves, unchecked, as below"
    if unsolved := [row["kind"] for row in kinds if not row["success"]]:
        yield f"{'':10} nobody solves {', '.join(unsolved[:KINDS_LISTED])}"


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


def _crew(crew: Mapping[str, Any], now: float) -> Iterator[str]:
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


def _averaging(figures: Mapping[str, Any], now: float, ended: bool, verbose: bool) -> Iterator[str]:
    partners, last = sorted(figures["partners"].values()), figures["last"]
    listed = ", ".join(partners[:PARTNERS_LISTED]) + (", …" if len(partners) > PARTNERS_LISTED else "")
    done = f"weights averaged {figures['exchanges']} times, {figures['bytes'] / 1e6:.2f} MB sent"
    if last:
        before = _ago(now - last["time"])
        done += f", last with {last['with']} {before.replace('ago', 'before the end') if ended else before}"
    yield f"averaging  {done}"
    if not verbose:
        return
    yield f"           {figures['method']}, {figures['when']}, {figures['codec']}; cohort {figures['cohort']}"
    if not ended:
        yield f"           partners here: {f'{len(partners)}, {listed}' if partners else 'none'}"
    for kind, text in (("skipped", "skipped"), ("refused", "refused to others in this start")):
        if reasons := _reasons(figures[kind], "", happened):
            yield f"           {text}: {reasons}"


def _when(found: Mapping[str, Any], now: float) -> str:
    status = found["swarm"]
    age = max(0.0, now - status["time"]) if status else None
    if not found["in_use"]:
        heard = max((known["time"] for known in (status, found["metrics"]) if known and "time" in known), default=None)
        ago = "" if heard is None else f" {_ago(now - heard)}"
        if found["killed"]:
            return f", killed or crashed{ago}, or the machine went down"
        return f", ended{ago}"
    if found["starting"]:
        seen = "of before" if age is None else f"as of {_ago(age)}"
        return f", starting (loading); what follows is {seen}, when it last ended"
    if age is not None and age > STATUS_FRESH_S:
        return f", as of {_ago(age)}: it stands still"
    return "" if found["paused"] else ", running"


def _traffic(traffic: Mapping[str, float] | None, seconds: float, verbose: bool) -> Iterator[str]:
    """The traffic of the `seconds` of a start; 0 = its time is not known."""
    if traffic is None:
        return
    inward, outward = traffic.get("bytes_in", 0.0), traffic.get("bytes_out", 0.0)
    hourly = f", {volume(3600 * (inward + outward) / seconds)} an hour" if seconds > 0 else ""
    yield f"{volume(inward)} in, {volume(outward)} out{hourly}"
    if not verbose:
        return
    yield f"{_count(traffic, 'messages_in')} messages in, {_count(traffic, 'messages_out')} out"
    yield f"gossip connections: {_count(traffic, 'connections/gossip')}"
    for name, text in (("restarts/gossip", "restarts of gossip"), ("restarts/dht", "restarts of p2pd")):
        if traffic.get(name):
            yield f"{_count(traffic, name)} {text}"


def _count(figures: Mapping[str, float], name: str) -> str:
    return f"{figures.get(name, 0):.0f}"


def _reasons(figures: Mapping[str, float], prefix: str, words: Callable[[str], str] = words) -> str:
    """`3 × too old, 1 × over the sender's quota`, the most frequent first."""
    counts = {name.removeprefix(prefix): n for name, n in figures.items() if name.startswith(prefix) and n}
    frequent = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{n:,.0f} × {words(reason)}" for reason, n in frequent)


def _table(peers: Mapping[str, Mapping[str, Any]], titles: Sequence[str], cells: Cells) -> Iterator[str]:
    rows = [["peer", "name", *titles]]
    for peer, figures in sorted(peers.items(), key=lambda item: (-item[1].get("received", 0), item[0])):
        rows.append(["…" + peer[-SHORT_ID:], figures.get("name") or "-", *cells(figures)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _exchanged(figures: Mapping[str, Any]) -> list[str]:
    refused = _reasons({f"/{name}": n for name, n in figures.get("rejected", {}).items()}, "/")
    return [
        "gone" if not figures.get("present") else "silent" if figures["absent"] else "yes",
        *(_cell(figures.get(name)) for name in ("policy_version", "received", "admitted", "used")),
        f"{'muted; ' if figures.get('muted') else ''}{refused}",
    ]


def _member(figures: Mapping[str, Any], averaged: bool, says: bool) -> list[str]:
    declared = figures.get("declared") or {}
    shares = [right / answers for answers, right in declared.get("kinds", {}).values()]
    success = _share(sum(shares) / len(shares) if shares else None)
    return [
        ", ".join(figures["roles"]),
        figures["family"] or "-",
        _cell(figures["policy_version"] or (0 if figures["speed"] else None)),  # a card has 0 until a round has ended
        _cell(figures["speed"] or None),
        *([success, _share(declared.get("pass_1"))] if says else []),
        *([figures["cohort"] or "-"] if averaged else []),
        (figures["addresses"] or ["-"])[0],
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
