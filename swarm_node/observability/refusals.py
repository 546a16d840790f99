"""Refusals by source: rows for `swarm-node status`, `doctor` and the dashboard, and the first refusals in words.

transport: source (peer id or IP address) -> reasons  --+--> rows, the worst sources first -> swarm.json
receiver:  author of rollouts -> reasons              --+
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from swarm_node.observability.reasons import HOSTILE, SAID, words
from swarm_node.say import Once, Warned
from swarm_protocol.transports.refusals import Refused

MAX_ROWS = 20  # most sources in a status: an attacker may have many names, and people read a few
NOTABLE = 10  # least refusals of a source for a row, if honest nodes cause such refusals now and then
MAX_REASONS = 3  # reasons named per source, the most frequent first; the status of a peer has all
SHORT_ID = 8  # last characters of a peer id that are shown: the first ones are the same for all


class RefusalRow(msgspec.Struct, frozen=True):
    """The refusals of one source."""

    source: str  # peer id, IPv4 address, or /64 of IPv6
    says: str  # the reasons in words: `1,204 × too many keys asked at once, 3 × malformed`
    count: int
    hostile: int  # refusals among them that an honest node hardly ever causes
    last: float  # Unix time of the latest refusal
    name: str = ""  # the name that the peer gives itself
    address: str = ""  # IP address that the source is connected from; empty if unknown

    @property
    def ip(self) -> str:
        """IP address that the source is connected from, or its /64, if known."""
        return self.address or (self.source if _is_ip(self.source) else "")

    def place(self) -> str:
        """The source for people: `bob …abcd1234 at 203.0.113.9`."""
        return place(self.source, self.address, self.name)


def refusal_rows(
    sources: Mapping[str, Refused], authors: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]
) -> list[RefusalRow]:
    """The worst sources first, at most `MAX_ROWS`, from `sources` of a transport and `authors` of `Receiver.by_peer`.

    Only hostile reasons of a receiver count: the table of peers shows the others. A source with few refusals, of kinds
    that honest nodes cause as well, is left out.
    """
    reasons: dict[str, Counter[str]] = {source: Counter(refused.reasons) for source, refused in sources.items()}
    last = {source: refused.last for source, refused in sources.items()}
    for author, account in authors.items():
        if hostile := {reason: n for reason, n in account["rejected"].items() if reason in HOSTILE}:
            reasons.setdefault(author, Counter()).update(hostile)
            last[author] = max(last.get(author, 0.0), account["last_seen"])
    found = [
        RefusalRow(
            source=source,
            says=says(counts),
            count=counts.total(),
            hostile=sum(n for reason, n in counts.items() if reason in HOSTILE),
            last=last[source],
            name=names.get(source, ""),
            address=sources[source].address if source in sources else "",
        )
        for source, counts in reasons.items()
    ]
    found = [row for row in found if row.hostile or row.count >= NOTABLE]
    return sorted(found, key=lambda row: (-row.hostile, -row.count, row.source))[:MAX_ROWS]


def says(counts: Mapping[str, int]) -> str:
    """The most frequent reasons with their counts, in words."""
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{n:,} × {words(reason)}" for reason, n in frequent[:MAX_REASONS]]
    if rest := sum(n for _, n in frequent[MAX_REASONS:]):
        named.append(f"{rest:,} × something else")
    return ", ".join(named)


def place(source: str, address: str = "", name: str = "") -> str:
    """A source for people: the end of a peer id, or an IP address."""
    if _is_ip(source):
        return source
    named = f"{name} …{source[-SHORT_ID:]}" if name else f"…{source[-SHORT_ID:]}"
    return f"{named} at {address}" if address else named


def _is_ip(source: str) -> bool:
    """Whether a source is an IP address or network: a peer id is base58, without dots and colons."""
    return "." in source or ":" in source


def say_first_refusals(once: Once, refused: Iterable[str], sources: Mapping[str, Refused]) -> None:
    """Say the first refusal of each kind; `refused` are the reasons that the transport has counted."""
    for reason in sorted(SAID.intersection(refused)):
        worst = max(sources, key=lambda source: sources[source].reasons.get(reason, 0), default="")
        known = bool(worst) and reason in sources[worst].reasons
        origin = f", from {place(worst, sources[worst].address)}" if known else ""
        rest = "Said once; `swarm-node status` counts what else is refused"
        once(reason, Warned(f"refused: {words(reason)}{origin}. {rest}"))
