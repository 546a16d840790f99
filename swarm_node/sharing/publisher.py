"""Own groups become signed batches: those worth sending, in a form and at a rate that no receiver refuses.

    groups -> signal? caps? -> wait (at most a second, or until a batch is full) -> quota, newest first -> sign -> send

A group travels as text with `finished` flags under the name of its task: no prompt, no truth, no reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from swarm_node.config import SharingConfig
from swarm_node.errors import UserError
from swarm_node.policy.policy import Policy
from swarm_node.sharing.peer_accounts import MINUTE_S
from swarm_node.tasks.judging import JUDGE
from swarm_node.tasks.one_turn import prompt_digest
from swarm_node.tasks.taskset import has_signal
from swarm_node.types import Group, Rollout, Sampling, Turn
from swarm_protocol.codec import SIGNED_HEAD_BYTES, sign_batch
from swarm_protocol.identity import Identity
from swarm_protocol.limits import (
    EPOCH_SECONDS,
    GROUPS_PER_SLOT,
    MAX_ADDRESS_CHARS,
    MAX_BATCH_ADDRESSES,
    MAX_BATCH_BYTES,
    MAX_GROUPS,
    MAX_ROUND_S,
    MAX_TOKENS,
)
from swarm_protocol.manifest import Manifest
from swarm_protocol.messages import (
    PROTOCOL_VERSION,
    RolloutBatch,
    SharedGroup,
    SharedRollout,
    SharedSampling,
    SharedTurn,
)
from swarm_protocol.peers import is_relayed

KINDS_SINCE = 2
"""Protocol that knows kinds of answers, and turns. Nodes of an earlier one have refused the manifest of a swarm that
has any kinds."""
FLUSH_S = 1.0  # batches leave at most this often, unless one is full
REST_BYTES = SIGNED_HEAD_BYTES + 512  # of a batch without groups and addresses: under 400 bytes
FULL_BYTES = MAX_BATCH_BYTES - REST_BYTES - MAX_BATCH_ADDRESSES * (MAX_ADDRESS_CHARS + 2)  # groups that fill a batch
MAX_ANSWERED = 16_384  # slots remembered as answered: those of four epochs, in 2 MB
QUOTA_SHARE = 0.9  # part of the swarm's limits that is used: what was sent evenly may arrive in bursts


@dataclass
class Quota:
    """A sender's side of the quota: groups or bytes that it may publish, by the minute of its clock.

    In second s of a minute it may have sent limit * (1/2 + s / 120) of that minute. Half goes at once, so that slow
    rounds fit; the rest goes evenly, so that a fast node is never silent for long.
    """

    limit: float
    minute: int = -1
    used: float = 0.0

    def level(self, now: float) -> float:
        """Amount that may be taken at `now` (Unix seconds)."""
        minute, second = divmod(now, MINUTE_S)
        if int(minute) != self.minute:
            self.minute, self.used = int(minute), 0.0
        so_far = max(1.0, self.limit * (0.5 + second / (2 * MINUTE_S)))  # 1: a limit of one group is one at any time
        return max(0.0, min(self.limit, so_far) - self.used)

    def take(self, cost: float) -> None:
        """Take `cost`, at most what `level` gave."""
        self.used += cost


@dataclass
class Publisher:
    """Sends a node's own groups."""

    send: Callable[[bytes], bool]  # takes a signed batch and says whether it left
    identity: Identity
    manifest: Manifest
    policy: Policy
    sampling: Sampling
    config: SharingConfig
    now: Callable[[], float]
    version: Callable[[], int] = lambda: PROTOCOL_VERSION  # gives the protocol version to write
    addresses: Callable[[], Sequence[str]] = tuple  # gives the addresses of this node, most useful first

    def __post_init__(self) -> None:
        """UserError for sampling that cannot be described."""
        sampling, limits = self.sampling, self.manifest.limits
        if sampling.max_new_tokens > MAX_TOKENS or sampling.temperature > 100:
            raise UserError(
                f"a swarm carries at most {MAX_TOKENS} tokens an answer, at temperatures up to 100: "
                "lower rollouts.max_new_tokens or rollouts.temperature"
            )
        self._swarm = self.manifest.swarm_id
        self._sampling = SharedSampling(sampling.max_new_tokens, sampling.temperature, sampling.top_p)
        self._groups_quota = Quota(max(1.0, QUOTA_SHARE * limits.groups_per_minute))
        self._bytes_quota = Quota(QUOTA_SHARE * limits.bytes_per_minute)
        self._waiting: list[tuple[SharedGroup, int]] = []  # with its encoded size in bytes
        self._flushed = float("-inf")
        self._answered: Counter[tuple[int, int]] = Counter()
        """(epoch, slot) -> groups shared, the slots answered first in front."""
        self._sequence = 0
        self._groups_sent = 0
        self._bytes_sent = 0
        self._unsent: Counter[str] = Counter()

    def publish(self, groups: Sequence[Group]) -> None:
        """Send this node's scored `groups`; some wait for a later call."""
        for group in groups:
            reason = self._refusal(group)
            if reason is None:
                shared = self._shared(group)
                size = len(msgspec.msgpack.encode(shared))
                if size <= FULL_BYTES:
                    self._answered[shared.epoch, shared.slot] += 1
                    if len(self._answered) > MAX_ANSWERED:
                        del self._answered[next(iter(self._answered))]
                    self._waiting.append((shared, size))
                    continue
                reason = "size"
            self._unsent[reason] += 1
        if self.now() - self._flushed >= FLUSH_S or sum(size for _, size in self._waiting) >= FULL_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send all waiting groups that the swarm's limits allow; the others are dropped."""
        if not self._waiting:
            return
        now, addresses = self.now(), addresses_named(self.addresses())
        cost = REST_BYTES + sum(len(address) + 2 for address in addresses)
        for batch in self._batches(self._within_quota(now, cost)):
            self._sequence += 1
            data = sign_batch(
                RolloutBatch(
                    protocol=max(self.version(), KINDS_SINCE) if any(map(_is_new, batch)) else self.version(),
                    swarm=self._swarm,
                    sequence=self._sequence,
                    created=now,
                    fingerprint=self.policy.fingerprint,
                    tokenizer=self.policy.tokenizer_hash,
                    sampling=self._sampling,
                    groups=batch,
                    addresses=addresses,
                ),
                self.identity,
            )
            if self.send(data):
                self._groups_sent += len(batch)
                self._bytes_sent += len(data)
            else:
                self._unsent["queue"] += len(batch)
        self._waiting.clear()
        self._flushed = now

    def metrics(self) -> dict[str, float]:
        """Running totals under `swarm/`."""
        unsent = {f"swarm/unsent/{reason}": float(n) for reason, n in sorted(self._unsent.items())}
        return {"swarm/groups_sent": float(self._groups_sent), "swarm/bytes_sent": float(self._bytes_sent)} | unsent

    def _refusal(self, group: Group) -> str | None:
        """Reason for which `group` is not sent; None if it is."""
        limits = self.manifest.limits
        if not has_signal(group.rollouts):
            return "zero"
        if any(rollout.cut for rollout in group.rollouts):
            return "turns"
        if group.task.slot is None or self._answered[group.task.slot] >= GROUPS_PER_SLOT:
            return "slot"  # receivers would refuse it
        if (group.task.slot[0] + 1) * EPOCH_SECONDS + MAX_ROUND_S < self.now() + FLUSH_S:
            return "age"
        if len(group.rollouts) > limits.max_rollouts or any(
            sum(len(turn.text) for turn in r.turns) > limits.max_answer_chars or r.num_tokens > limits.max_answer_tokens
            for r in group.rollouts
        ):
            return "cap"
        return None

    def _shared(self, group: Group) -> SharedGroup:
        assert group.task.slot is not None
        epoch, slot = group.task.slot
        return SharedGroup(
            task=group.task.name,
            epoch=epoch,
            slot=slot,
            prompt=prompt_digest(group.task.question),
            policy_version=group.policy_version,
            rollouts=[self._shared_rollout(r) for r in group.rollouts],
            kind=group.task.kind,
            judge=JUDGE if group.task.kind else 0,
        )

    def _shared_rollout(self, rollout: Rollout) -> SharedRollout:
        turns = [self._shared_turn(turn) for turn in rollout.turns]
        return SharedRollout(turns, [prompt_digest(turn.asked) for turn in rollout.turns[1:]])

    def _shared_turn(self, turn: Turn) -> SharedTurn:
        if not self.config.token_ids:
            return SharedTurn(turn.text, turn.finished)
        logprobs = np.array(turn.logprobs, dtype="<f2").tobytes()
        return SharedTurn(turn.text, turn.finished, turn.token_ids, logprobs)

    def _within_quota(self, now: float, cost: int) -> list[tuple[SharedGroup, int]]:
        """The newest waiting groups that this minute's limits leave room for, oldest first; the rest is dropped. `cost`
        is what a batch itself takes, in bytes."""
        groups, room = self._groups_quota.level(now), self._bytes_quota.level(now)
        kept: list[tuple[SharedGroup, int]] = []
        for shared, size in reversed(self._waiting):
            if len(kept) + 1 > groups or cost + size > room:
                break
            cost += size
            kept.append((shared, size))
        if kept:
            self._groups_quota.take(len(kept))
            self._bytes_quota.take(cost)
        if len(kept) < len(self._waiting):
            self._unsent["rate"] += len(self._waiting) - len(kept)
        return kept[::-1]

    def _batches(self, groups: Sequence[tuple[SharedGroup, int]]) -> Iterator[list[SharedGroup]]:
        batch: list[SharedGroup] = []
        filled = 0
        for shared, size in groups:
            if batch and (len(batch) == MAX_GROUPS or filled + size > FULL_BYTES):
                yield batch
                batch, filled = [], 0
            batch.append(shared)
            filled += size
        if batch:
            yield batch


def addresses_named(addresses: Sequence[str]) -> list[str]:
    """The addresses that a batch names, half of them through relays if there are such."""
    fitting = [address for address in addresses if len(address) <= MAX_ADDRESS_CHARS]
    relayed = [address for address in fitting if is_relayed(address)][: MAX_BATCH_ADDRESSES // 2]
    direct = [address for address in fitting if not is_relayed(address)]
    return [*direct[: MAX_BATCH_ADDRESSES - len(relayed)], *relayed]


def _is_new(group: SharedGroup) -> bool:
    """Whether its answers are of a kind, or have turns, that protocol 1 does not know."""
    return group.kind not in ("", "text") or any(len(rollout.turns) > 1 for rollout in group.rollouts)
