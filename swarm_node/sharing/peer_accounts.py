"""What each peer sent, what became of it, and who is not listened to for a while.

    rejections of a malicious kind, one forgiven every FORGIVE_S  >=  MUTE_AFTER   ->   muted for MUTE_S, here only

Bounded whatever arrives: a stranger can make any number of keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.manifest import ManifestLimits
from swarm_node.observability.reasons import words
from swarm_node.sharing.quota import Minutes

REASONS = frozenset(
    "size echo signature version newer schema swarm duplicate slot age future muted quota cap task assignment prompt "
    "length text error zero pool surplus".split()
)
"""All that a group or a message is ever rejected for; docs/sharing.md explains each."""
MALICIOUS = frozenset({"schema", "assignment", "cap"})
"""No honest node of this version sends such a thing under its own signature. (`signature` names nobody.)"""
UNSAID = frozenset({"duplicate", "surplus", "muted", "newer"})
"""Nobody's fault, or said already, or by the member: the network hears more of those."""
MUTE_AFTER = 8
FORGIVE_S = 60.0
MUTE_S = 300.0
MAX_PEERS = 1024
"""Peers with an account; who has been silent longest loses it."""
MAX_SAID = 200
"""Peers of which is said that they are muted; the rest is counted."""


@dataclass
class Account:
    """One peer, as this node sees it."""

    minutes: Minutes
    received: int = 0
    """Groups, in batches with a valid signature."""
    received_bytes: int = 0
    admitted: int = 0
    age_sum: float = 0.0
    """Seconds between sampling and admission, over all admitted."""
    last_seen: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    offences: float = 0.0
    forgiven_at: float = 0.0
    muted_until: float = 0.0


class Ledger:
    """Accounts of peers."""

    def __init__(self, limits: ManifestLimits, now: Callable[[], float], say: Callable[[str], None]) -> None:
        self._limits = limits
        self._now = now
        self._say = say
        self.accounts: dict[str, Account] = {}
        """Whoever was heard last comes last."""
        self.rejected: Counter[str] = Counter()
        """By reason, from whomever; running totals."""
        self._said: set[str] = set()
        """Reasons whose first refusal was put into words."""
        self._said_muted: set[str] = set()

    def account(self, peer: str) -> Account:
        """The account of a peer that was heard just now."""
        now = self._now()
        account = self.accounts.pop(peer, None)
        if account is None:
            limits = self._limits
            account = Account(Minutes(limits.groups_per_minute, limits.bytes_per_minute))
        self.accounts[peer] = account
        if len(self.accounts) > MAX_PEERS:
            del self.accounts[next(iter(self.accounts))]
        account.last_seen = now
        return account

    def is_muted(self, peer: str) -> bool:
        account = self.accounts.get(peer)
        return account is not None and self._now() < account.muted_until

    def reject(self, reason: str, peer: str | None = None, detail: str = "", n: int = 1) -> None:
        """Count `n` rejections; `peer` is `None` where nothing proves who sent it."""
        assert reason in REASONS, reason
        self.rejected[reason] += n
        account = None if peer is None else self.accounts.get(peer)
        if account is not None:
            account.rejected[reason] += n
        if reason not in UNSAID and reason not in self._said:
            self._said.add(reason)
            origin = peer or "an unproven sender"
            self._say(f"refused: {words(reason)} ({reason}), from {origin}{_printable(detail)} (said once)")
        if account is not None and peer is not None and reason in MALICIOUS:
            self._offend(peer, account, n)

    def _offend(self, peer: str, account: Account, n: int) -> None:
        now = self._now()
        account.offences = max(0.0, account.offences - (now - account.forgiven_at) / FORGIVE_S) + n
        account.forgiven_at = now
        if account.offences >= MUTE_AFTER:
            account.offences = 0.0
            account.muted_until = now + MUTE_S
            if peer not in self._said_muted and len(self._said_muted) < MAX_SAID:
                self._said_muted.add(peer)
                self._say(f"{peer} is muted for {MUTE_S:.0f} s: it keeps sending what no honest node sends")


def _printable(detail: str) -> str:
    """A stranger's text, safe for a terminal and short."""
    return f": {ascii(detail[:160])[1:-1]}" if detail else ""
