"""The text of `swarm-node status`, from its JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from swarm_node.averaging.skipping import happened
from swarm_node.config.figures import WORDS
from swarm_node.observability.reasons import UNUSED, words
from swarm_node.observability.refusals import SHORT_ID, RefusalRow
from swarm_node.observability.usage import usage_of
from swarm_node.observability.worth import Worth, worth_lines

PARTNERS_LISTED = 8  # most averaging partners that are named
KINDS_LISTED = 8  # most kinds of task that a line names
REJECTED = "swarm/rejected/"  # start of the names of counts of groups that were left out
WORST = 5  # most sources of refusals that are named
STATUS_FRESH_S = 30.0  # a run whose status is older than this stands still or has ended
Cells = Callable[[Mapping[str, Any]], list[str]]


def status_lines(found: Mapping[str, Any], now: float, verbose: bool = False) -> Iterator[str]:
    """The document `found` as text, at Unix time `now`: first what holds for the whole run, then what its present or
    last start counted. `verbose`: technical details too."""
    status, metrics = found["swarm"], found["metrics"]
    ended = bool(found["run"]) and (not found["in_use"] or found["starting"])
    reward = (metrics or {}).get("reward")
    if found["run"]:
        yield f"run        {found['run']}{_when(found, now)}"
    if found.get("paused"):
        yield f"paused     {found['paused']}"
    if metrics:
        yield f"round      {metrics['round']}" + ("" if reward is None else f", reward {reward:.3f}")
    if best := found.get("best"):
        yield f"held-out   best {WORDS[best['figure']]} {best['value']:.3f}, after round {best['round']:,}"
    for number, line in enumerate(_worth(status or {})):
        yield f"{'' if number else 'worth':10} {line}"
    if (usage := usage_of(metrics or {})) is not None and not ended and not found["paused"]:
        yield f"uses       {usage.words()}, {usage.disk / 1e6:,.0f} MB of the disk"
    if status is None:
        yield "swarm      none: this run trains alone"
        return
    named = [status.get("swarm_name"), status["swarm"][:16]]
    yield f"swarm      {' '.join(filter(None, named))}"
    if "peer" in status:
        yield f"node       {status.get('name') or 'node'}, peer {status['peer']}"
        yield f"reached at {', '.join(status['addresses']) or 'no address: this node only dials'}"
    if status.get("link"):
        yield f"join link  {status['link']}"
    if status.get("averaging"):
        yield from _averaging(status["averaging"], status["time"], ended, verbose)
    if "since" in status:
        which = "last" if ended else "this"
        yield f"{which} start began {_ago(now - status['since'])}; what follows is of it alone"
    if "traffic" in status:
        yield f"traffic    {_traffic(status['traffic'], verbose)}"
    if "sent" in status:
        unsent = _reasons(status["sent"], "swarm/unsent/")
        why = f"; not sent: {unsent}" if unsent else ""
        yield f"sent       {_count(status['sent'], 'swarm/groups_sent')} groups{why}"
    if "received" in status:
        came, admitted = (_count(status["received"], f"swarm/groups_{name}") for name in ("received", "admitted"))
        used = (metrics or {}).get("swarm/groups_used")
        last = "" if used is None else f", used {used:.0f} in the last round"
        waiting = _count(status["received"], "swarm/groups_waiting")
        rest = "" if waiting == "0" else f", {waiting} {'never examined' if ended else 'not examined yet'}"
        yield f"received   {came} groups, admitted {admitted}{rest}{last}"
    left_out = {name: n for name, n in status.get("received", {}).items() if name.startswith(REJECTED)}
    unused = {name: n for name, n in left_out.items() if name.removeprefix(REJECTED) in UNUSED}
    if reasons := _reasons(unused, REJECTED):
        yield f"not used   {reasons}"
    if refused := _reasons({name: n for name, n in left_out.items() if name not in unused}, REJECTED):
        yield f"refused    {refused}"
    yield from _sources(status, "" if refused else "refused")
    if status.get("crew"):
        yield from _crew(status["crew"], status["time"])
    absent = (status.get("crew") or {}).get("absent", [])
    peers = {peer: figures | {"absent": peer in absent} for peer, figures in status.get("peers", {}).items()}
    if not status.get("connected", True):
        where = ", ".join(status["asked"][:3])
        tried = "something answers at {}, but not as a peer: `swarm-node doctor` may say why"
        yield f"members    unknown: {(tried if status['answered'] else 'nobody answered at {}').format(where)}"
        return
    here = [peer for peer in peers.values() if peer.get("present") and not peer["absent"]]
    training = sum(peer.get("trains", True) for peer in here)
    others = f" other{'' if len(here) == 1 else 's'}" if found["run"] else ""
    of_them = "" if training == len(here) else f", {training or 'none'} of them training"
    yield f"members    {len(here)}{others}{of_them}{' when this run ended' if ended else ''}"
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


def _worth(status: Mapping[str, Any]) -> Iterator[str]:
    """What the swarm gave the run; a status of another version has none."""
    try:
        worth = msgspec.convert(status.get("worth") or {}, Worth)
    except msgspec.ValidationError:
        return
    yield from worth_lines(worth)


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


def _sources(status: Mapping[str, Any], label: str) -> Iterator[str]:
    """The sources with most refusals, one line each, the first after `label`."""
    found = msgspec.convert(status.get("refused", []), list[RefusalRow])
    for i, row in enumerate(found[:WORST]):
        yield f"{'' if i else label:10} {row.says}, from {row.place()}, last {_ago(status['time'] - row.last)}"
    if len(found) > WORST:
        others = sum(row.count for row in found[WORST:])
        yield f"{'':10} {others:,} from {len(found) - WORST} others"


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    units = (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0), ("days", 86400.0, math.inf))
    unit, length, _ = next(each for each in units if seconds < each[2])
    return f"{seconds / length:.0f} {unit} ago"


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
    if verbose:
        yield f"           {figures['method']}, {figures['when']}, {figures['codec']}; cohort {figures['cohort']}"
    if not ended:
        yield f"           partners here: {f'{len(partners)}, {listed}' if partners else 'none'}"
    for kind, text in (("skipped", "skipped"), ("refused", "refused to others in this start")):
        if reasons := _reasons(figures[kind], "", happened):
            yield f"           {text}: {reasons}"


def _when(found: Mapping[str, Any], now: float) -> str:
    status = found["swarm"]
    age = max(0.0, now - status["time"]) if status else None
    seen = "" if age is None else f"as of {_ago(age)}"
    if not found["in_use"]:
        return f", ended; {seen}" if seen else ", finished"
    if found["starting"]:
        return f", starting (loading); what follows is {seen or 'of before'}, when it last ended"
    return f", {seen}: it stands still" if age is not None and age > STATUS_FRESH_S else ""


def _traffic(traffic: Mapping[str, float], verbose: bool) -> str:
    parts = [f"{traffic.get('bytes_in', 0) / 1e6:.2f} MB in, {traffic.get('bytes_out', 0) / 1e6:.2f} MB out"]
    if not verbose:
        return parts[0]
    parts += [
        f"{_count(traffic, 'messages_in')} messages in, {_count(traffic, 'messages_out')} out",
        f"gossip connections: {_count(traffic, 'connections/gossip')}",
    ]
    for name, text in (("restarts/gossip", "restarts of gossip"), ("restarts/dht", "restarts of p2pd")):
        if traffic.get(name):
            parts.append(f"{_count(traffic, name)} {text}")
    return "; ".join(parts)


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
