"""What each peer sent, what became of it, how far it is trusted, and who is not listened to for a while.

    muted    rejections of a malicious kind, one forgiven every FORGIVE_S  >=  MUTE_AFTER   ->   for MUTE_S, here only
    quota    at most a minute's limits of what was made in one minute of the peer's clock, whenever it arrives
    trust    1 - p / (n + 1);   n <- d n + 1,   p <- d p + s   after a group with a share s of payloads among its right
             answers, d = PAYLOAD_DECAY

A peer begins with trust 1, falls to 1/2 with one group full of payloads and to 1/20 with many. Its groups are then
drawn less often, but never shut out: a peer whose model merely writes otherwise raises its trust with one good group.

All of this is bounded, because a stranger can make any number of keys.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarm_node.observability.reasons import words
from swarm_node.say import Warned
from swarm_protocol.manifest import ManifestLimits

REASONS = frozenset(
    "size echo signature version newer schema swarm duplicate slot age future muted quota cap turns task assignment "
    "judge prompt length text error zero balance pool surplus".split()
)
"""Reasons for which a group or a message is rejected; docs/sharing.md explains each."""
MALICIOUS = frozenset({"schema", "assignment", "cap"})
"""Reasons that no honest node of this version gives under its own signature. (`signature` names nobody.)"""
UNSAID = frozenset({"balance", "duplicate", "surplus", "muted", "newer"})
"""Reasons that are not reported here: they are nobody's fault, or the member reports them."""
MUTE_AFTER = 8
FORGIVE_S = 60.0
MUTE_S = 300.0
MAX_PEERS = 1024  # peers with an account, and peers with a trust below 1; the one silent longest is forgotten
MAX_SAID = 200  # peers whose muting is reported; of the rest only the number is known
MINUTE_S = 60.0
MAX_MINUTES = 32  # minutes of a peer that are remembered: three times what is not too old by default, in 5 kB
PAYLOAD_DECAY = 0.95  # about the last twenty groups of a peer are remembered
MEASURED_DECAY = 0.95  # about the last twenty steps with answers of a peer count
DISTRUSTED = 0.5  # trust below which a peer is named


@dataclass
class PeerAccount:
    """One peer, as this node sees it."""

    minutes: Minutes
    received: int = 0  # groups, in batches with a valid signature
    received_bytes: int = 0
    admitted: int = 0
    age_sum: float = 0.0  # seconds between sampling and admission, over all admitted
    last_seen: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By name of a figure of `grpo.off_policy.figures_by_peer`, the decayed number of steps and the sum over them.
    Replaced as a whole."""
    offences: float = 0.0
    forgiven_at: float = 0.0
    muted_until: float = 0.0

    def off_policy(self) -> dict[str, float]:
        """Means of what was measured of its tokens lately, by name."""
        return {name: total / steps for name, (steps, total) in self.measured.items()}


@dataclass
class PeerAccounts:
    """The accounts of all peers, and the reports about them."""

    limits: ManifestLimits
    now: Callable[[], float]
    say: Callable[[str], None]
    accounts: dict[str, PeerAccount] = field(default_factory=dict)  # accounts by peer, the one heard last at the end
    rejected: Counter[str] = field(default_factory=Counter)  # rejections by reason, over all senders; running totals
    said: set[str] = field(default_factory=set)  # reasons that were reported
    said_muted: set[str] = field(default_factory=set)  # peers whose muting was reported

    def account(self, peer: str) -> PeerAccount:
        """The account of a peer that was heard just now."""
        self.accounts[peer] = account = self.accounts.pop(peer, None) or PeerAccount(Minutes(self.limits))
        if len(self.accounts) > MAX_PEERS:
            del self.accounts[next(iter(self.accounts))]
        account.last_seen = self.now()
        return account

    def measure(self, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Take in the figures of a step by peer; peers without an account are left out."""
        for peer in figures.keys() & self.accounts.keys():
            account = self.accounts[peer]
            new = dict(account.measured)
            for name, value in figures[peer].items():
                steps, total = new.get(name, (0.0, 0.0))
                new[name] = MEASURED_DECAY * steps + 1, MEASURED_DECAY * total + value
            account.measured = new

    def is_muted(self, peer: str) -> bool:
        account = self.accounts.get(peer)
        return account is not None and self.now() < account.muted_until

    def reject(self, reason: str, peer: str | None = None, detail: str = "", n: int = 1) -> None:
        """Count `n` rejections; `peer` is `None` where nothing proves who sent it."""
        assert reason in REASONS, reason
        self.rejected[reason] += n
        account = None if peer is None else self.accounts.get(peer)
        if account is not None:
            account.rejected[reason] += n
        if reason not in UNSAID and reason not in self.said:
            self.said.add(reason)
            origin = peer or "an unproven sender"
            shown = f": {ascii(detail[:160])[1:-1]}" if detail else ""  # a stranger's text, safe for a terminal
            self.say(Warned(f"refused: {words(reason)} ({reason}), from {origin}{shown} (said once)"))
        if account is None or peer is None or reason not in MALICIOUS:
            return
        now = self.now()
        account.offences = max(0.0, account.offences - (now - account.forgiven_at) / FORGIVE_S) + n
        account.forgiven_at = now
        if account.offences >= MUTE_AFTER:
            account.offences = 0.0
            account.muted_until = now + MUTE_S
            if peer not in self.said_muted and len(self.said_muted) < MAX_SAID:
                self.said_muted.add(peer)
                self.say(Warned(f"{peer} is muted for {MUTE_S:.0f} s: it keeps sending what no honest node sends"))


@dataclass
class Minutes:
    """A receiver's side of the quota: what one peer's groups took of its limits, by the minute that they were made in.

    The minute of arrival does not count, so an old message that somebody repeats uses up an old minute.
    """

    limits: ManifestLimits
    used: dict[int, tuple[int, float]] = field(default_factory=dict)  # minute -> (groups, bytes)

    def take(self, created: float, size: float) -> bool:
        """Count a group of `size` bytes made at `created` (Unix seconds); False if its minute has no room for it, or
        is older than all that are remembered."""
        minute = int(created // MINUTE_S)
        if minute not in self.used and len(self.used) >= MAX_MINUTES:
            oldest = min(self.used)
            if minute < oldest:
                return False
            del self.used[oldest]
        groups, taken = self.used.get(minute, (0, 0.0))
        fits = groups + 1 <= self.limits.groups_per_minute and taken + size <= self.limits.bytes_per_minute
        self.used[minute] = (groups + 1, taken + size) if fits else (groups, taken)
        return fits


@dataclass
class _Payloads:
    """Decayed sums over one peer's groups."""

    groups: float = 0.0
    payloads: float = 0.0  # sum of shares of payloads
    refused: int = 0  # groups with a payload, a running total


class Trust:
    """How much of each peer's right answers carried no payload, lately."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, _Payloads] = OrderedDict()

    def judged(self, peer: str, share: float) -> None:
        """A group of `peer` was judged: `share` of its right answers carry a payload."""
        account = self._accounts.setdefault(peer, _Payloads())
        self._accounts.move_to_end(peer)
        account.groups = PAYLOAD_DECAY * account.groups + 1
        account.payloads = PAYLOAD_DECAY * account.payloads + share
        account.refused += share > 0
        if len(self._accounts) > MAX_PEERS:
            self._accounts.popitem(last=False)

    def of(self, peer: str) -> float:
        """Trust of a peer, in (0, 1]."""
        account = self._accounts.get(peer, _Payloads())
        return 1 - account.payloads / (account.groups + 1)

    def refused(self) -> dict[str, int]:
        """Groups with a payload, by peer; running totals."""
        return {peer: account.refused for peer, account in list(self._accounts.items()) if account.refused}
