"""From bytes of strangers to groups worth training on.

    transport's thread   take:  size -> inbox (bounded; the oldest makes room)
    main thread          admit: newest first:  echo -> muted -> signature -> version -> schema -> swarm
                                of each group: duplicate -> slot -> age -> quota -> turns, caps -> waiting (bounded)
                                some of these: task -> assignment -> judge -> prompt -> length, text -> score -> signal
                                -> buffer

Cheap checks come first. Before the last check passes, a group changes only its sender's account and the memory of seen
groups. Every rejection is counted by reason and, where a signature proves the sender, by peer. `admit` stops when its
share of the training thread's time is used. If one group takes longer than that, later calls wait until the excess is
made up for.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from swarm_node.config import SharingConfig
from swarm_node.policy.policy import Policy
from swarm_node.sharing.peer_accounts import PeerAccount, PeerAccounts
from swarm_node.tasks.dialogue import Dialogue
from swarm_node.tasks.judging import JUDGE
from swarm_node.tasks.one_turn import prompt_digest
from swarm_node.tasks.taskset import TaskSet, has_signal, slot_key
from swarm_node.types import Group, Sampling, Task, Turn
from swarm_protocol.codec import SIGNED_HEAD_BYTES, SPOKEN, verify_batch
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.identity import PUBLIC_KEY_BYTES, peer_id_of
from swarm_protocol.limits import EPOCH_SECONDS, GROUPS_PER_SLOT, MAX_BATCH_BYTES, MAX_CLOCK_SKEW_S, MAX_ROUND_S
from swarm_protocol.manifest import Manifest
from swarm_protocol.messages import RolloutBatch, SharedGroup, SharedRollout, SharedTurn

INBOX_BYTES = 16 * MAX_BATCH_BYTES
INBOX_MESSAGES = 1024
"""Messages that wait during a round. With `INBOX_BYTES`, this bounds the time that one `admit` takes to open them."""
OPENED = 64  # messages opened in one `admit`: 0.2 ms each
MAX_WAITING = 1024
WAITING_BYTES = 16 * MAX_BATCH_BYTES  # bounds what was opened and waits to be examined; the oldest makes room
MAX_SEEN = 2**16
"""Slots remembered with the groups that answered them: ten minutes of a hundred groups a second, in about 20 MB."""
LATE_S = 60.0
"""Groups that were made longer ago than this when they are opened wait behind all others. So old messages that somebody
repeats hold up no new ones, which arrive within seconds."""
ADMIT_SHARE = 0.1
"""Share of the time since the last `admit` that the next may take from training. It bounds how far a flood, or rewards
that wait for another machine, slow training down."""
ADMIT_LEAST_S, ADMIT_MOST_S = 0.02, 1.0
"""Bounds on that time: the least suffices for forty groups of short answers, and the most for those of a slow round."""
PROVEN = frozenset({"version", "newer", "schema", "swarm"})
"""Reasons that `verify_batch` gives after it has verified the signature."""

_Waiting = tuple[str, PeerAccount, RolloutBatch, SharedGroup, float]
"""Sender, its account, the batch, one group of it, and that group's part of the message in bytes."""


class Receiver:
    """Admits groups of other peers."""

    def __init__(
        self,
        me: str,
        manifest: Manifest,
        policy: Policy,
        sampling: Sampling,
        tasks: TaskSet,
        config: SharingConfig,
        add: Callable[[Group], str | None],
        now: Callable[[], float],
        say: Callable[[str], None],
        spoken: Collection[int] = SPOKEN,
        hear: Callable[[str, Sequence[str]], None] = lambda peer, addresses: None,
        spent: Callable[[], float] = time.monotonic,
    ) -> None:
        """`add` takes an admitted group, or says why not. `say` gets the first rejection of each reason. `spoken` are
        the protocol versions that are understood. `hear` is told where senders say that they can be reached, before
        their groups are examined.

        `spent` is the clock (seconds) that bounds admission: a call of a reward function holds training up as long as
        it takes, whether it computes or waits.
        """
        self._spoken = spoken
        self._me = me
        self._swarm = manifest.swarm_id
        self._limits = manifest.limits
        self._most_chars = manifest.limits.max_answer_chars
        self._max_age = min(manifest.limits.max_age_s, config.max_age_s)
        self._budget = max(config.admit, config.foreign)
        self._add = add
        self._hear = hear
        self._now = now
        self._spent = spent
        self._admitted_at = spent()
        self._debt = 0.0  # seconds that earlier calls of `admit` took beyond what they were allowed
        self._admission = Admission(self._swarm, policy, sampling.max_new_tokens, tasks)
        self._accounts = PeerAccounts(manifest.limits, now, say)
        self._seen: dict[bytes, tuple[float, tuple[bytes, ...]]] = {}
        """Slot -> (when its last group came, content ids of its groups), oldest first."""
        self._waiting: deque[_Waiting] = deque()  # newest last
        self._waiting_bytes = 0.0
        self._received = 0
        self._admitted = 0
        self._lock = threading.Lock()  # guards what follows: the transport's thread writes it
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._missized = 0
        self._overflowed = 0

    # ----------------------------------------------------------------- transport's thread

    def take(self, data: bytes) -> None:
        """Keep one message for `admit`."""
        with self._lock:
            if not SIGNED_HEAD_BYTES < len(data) <= MAX_BATCH_BYTES:
                self._missized += 1
                return
            self._inbox.append(data)
            self._inbox_bytes += len(data)
            while self._inbox_bytes > INBOX_BYTES or len(self._inbox) > INBOX_MESSAGES:
                self._inbox_bytes -= len(self._inbox.popleft())
                self._overflowed += 1

    # ----------------------------------------------------------------- main thread

    def admit(self, enough: int | None = None) -> int:
        """Examine arrived groups, newest first, until `enough` are admitted; how many were admitted.

        At most `sharing.admit` of them are examined, and no longer than this thread's share of time allows. The others
        wait for the next call.
        """
        if enough is not None and enough <= 0:
            return 0
        self._tidy()
        began = self._spent()
        allowed = self._allowance(began)
        if not allowed:
            return 0
        self._open_newest(began + allowed / 2)
        before = self._admitted
        for i in range(min(self._budget, len(self._waiting))):
            if i and self._spent() >= began + allowed:  # the first is examined in any case, so that some are
                break
            if self._admitted - before == enough:
                break
            peer, account, batch, group, size = self._waiting.pop()
            self._waiting_bytes -= size
            try:
                self._examine(peer, account, batch, group)
            except RemoteProtocolError as error:
                self._accounts.reject(error.reason, peer, error.detail)
        self._debt = max(0.0, self._spent() - began - allowed)
        return self._admitted - before

    def measure(self, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Keep what a step measured of peers' tokens: `grpo.off_policy.figures_by_peer`."""
        self._accounts.measure(figures)

    def metrics(self) -> dict[str, float]:
        """Running totals under `swarm/`."""
        self._tidy()
        rejected = {f"swarm/rejected/{reason}": float(n) for reason, n in sorted(self._accounts.rejected.items())}
        return {
            "swarm/groups_received": float(self._received),
            "swarm/groups_admitted": float(self._admitted),
        } | rejected

    def totals(self) -> dict[str, float]:
        """Groups received, admitted and not examined yet, as of now. For any thread."""
        return {
            "swarm/groups_admitted": float(self._admitted),  # first: it may not exceed what was received
            "swarm/groups_waiting": float(len(self._waiting)),
            "swarm/groups_received": float(self._received),
        }

    def by_peer(self) -> dict[str, dict[str, Any]]:
        """Figures of each peer: what it sent, and what became of it. `staleness` is the mean age at admission in
        seconds; `off_policy` has the figures of `grpo.off_policy.figures_by_peer` of its tokens that were trained on
        lately, none of them before."""
        return {
            peer: {
                "received": account.received,
                "admitted": account.admitted,
                "rejected": dict(account.rejected),
                "bytes": account.received_bytes,
                "last_seen": account.last_seen,
                "staleness": account.age_sum / account.admitted if account.admitted else None,
                "off_policy": account.off_policy(),
                "muted": self._accounts.is_muted(peer),
            }
            for peer, account in list(self._accounts.accounts.items())  # all at once: another thread may be asking
        }

    # ----------------------------------------------------------------- one message

    def _allowance(self, now: float) -> float:
        """Seconds of this thread's time that an `admit` may take now; 0 while earlier ones are not made up for."""
        share, self._admitted_at = ADMIT_SHARE * (now - self._admitted_at), now
        owed, self._debt = self._debt, max(0.0, self._debt - share)
        return 0.0 if self._debt else min(max(share - owed, ADMIT_LEAST_S), ADMIT_MOST_S)

    def _open_newest(self, stop: float) -> None:
        """Move the groups of the newest messages to those that wait to be examined: at most `OPENED` messages, and
        after `stop` only one."""
        opened: list[list[_Waiting]] = []
        while len(opened) < OPENED and (not opened or self._spent() < stop):
            with self._lock:
                if not self._inbox:
                    break
                data = self._inbox.pop()
                self._inbox_bytes -= len(data)
            opened.append(self._groups_in(data))
        late = self._now() - LATE_S
        for groups in reversed(opened):
            self._waiting += [group for group in groups if group[2].created >= late]
        for groups in opened:
            self._waiting.extendleft(group for group in reversed(groups) if group[2].created < late)
        self._waiting_bytes += sum(size for groups in opened for *_, size in groups)
        while len(self._waiting) > MAX_WAITING or self._waiting_bytes > WAITING_BYTES:
            peer, *_, size = self._waiting.popleft()
            self._waiting_bytes -= size
            self._accounts.reject("surplus", peer)

    def _groups_in(self, data: bytes) -> list[_Waiting]:
        """The groups of a message that pass the cheap checks."""
        claimed = peer_id_of(data[:PUBLIC_KEY_BYTES])  # who lies here has only this message dropped
        if claimed == self._me:
            self._accounts.reject("echo")
            return []
        if self._accounts.is_muted(claimed):
            self._accounts.reject("muted", claimed)
            return []
        try:
            peer, batch = verify_batch(data, self._swarm, self._spoken)
        except RemoteProtocolError as error:
            if error.reason in PROVEN:
                self._accounts.account(claimed)
            self._accounts.reject(error.reason, claimed if error.reason in PROVEN else None, error.detail)
            return []
        account = self._accounts.account(peer)
        account.received += len(batch.groups)
        account.received_bytes += len(data)
        self._received += len(batch.groups)
        size = len(data) / len(batch.groups)
        waiting: list[_Waiting] = []
        for group in batch.groups:
            try:
                self._check(peer, account, batch, group, size)
            except RemoteProtocolError as error:
                self._accounts.reject(error.reason, peer, error.detail)
            else:
                waiting.append((peer, account, batch, group, size))
        if waiting and batch.addresses:
            self._hear(peer, batch.addresses)
        return waiting

    def _check(self, peer: str, account: PeerAccount, batch: RolloutBatch, group: SharedGroup, size: float) -> None:
        """Check a group without its task: duplicate, slot, age, future, quota, caps."""
        now = self._now()
        slot, content = slot_id(peer, group), content_id(peer, group)
        _, answered = self._seen.get(slot, (now, ()))
        if content in answered:
            raise RemoteProtocolError("duplicate")
        if len(answered) >= GROUPS_PER_SLOT:
            raise RemoteProtocolError("slot", f"answers to the task of slot {group.slot} for the third time")
        drawn = group.epoch * EPOCH_SECONDS
        if max(batch.created, drawn) > now + MAX_CLOCK_SKEW_S:
            raise RemoteProtocolError("future", f"{max(batch.created, drawn) - now:.0f} s ahead")
        if batch.created < now - self._max_age:
            raise RemoteProtocolError("age", f"{now - batch.created:.0f} s old")
        if drawn + EPOCH_SECONDS + MAX_ROUND_S < batch.created:
            raise RemoteProtocolError("age", f"answers to a task of {batch.created - drawn:.0f} s before")
        if not account.minutes.take(batch.created, size):
            raise RemoteProtocolError("quota")
        self._seen.pop(slot, None)  # so that it is the newest
        self._seen[slot] = now, (*answered, content)
        self._check_caps(group)  # last, so that an offence that somebody replays is a duplicate

    def _check_caps(self, shared: SharedGroup) -> None:
        """Check a group for more or longer rollouts than the swarm's manifest allows, all turns of one together."""
        if len(shared.rollouts) > self._limits.max_rollouts:
            raise RemoteProtocolError("cap", f"{len(shared.rollouts)} rollouts")
        longest = max(sum(len(turn.text) for turn in rollout.turns) for rollout in shared.rollouts)
        if longest > self._most_chars:
            raise RemoteProtocolError("cap", f"a text of {longest} characters")
        most = max(sum(len(turn.token_ids or ()) for turn in rollout.turns) for rollout in shared.rollouts)
        if most > self._limits.max_answer_tokens:
            raise RemoteProtocolError("cap", f"an answer of {most} tokens")

    def _examine(self, peer: str, account: PeerAccount, batch: RolloutBatch, shared: SharedGroup) -> None:
        """Everything else; the group is in the replay buffer unless this raises."""
        if self._accounts.is_muted(peer):  # since it came
            raise RemoteProtocolError("muted")
        group = self._admission.rebuild(peer, batch, shared)
        group.created = min(group.created, self._now())
        refused = self._add(group)
        if refused is not None:
            raise RemoteProtocolError("balance" if refused == "balance" else "pool", refused)
        self._admitted += 1
        account.admitted += 1
        account.age_sum += self._now() - group.created

    def _tidy(self) -> None:
        """Count what `take` dropped; forget groups that are too old to come again."""
        with self._lock:
            missized, overflowed = self._missized, self._overflowed
            self._missized = self._overflowed = 0
        for reason, n in (("size", missized), ("surplus", overflowed)):
            if n:
                self._accounts.reject(reason, n=n)
        forgotten = self._now() - (self._max_age + EPOCH_SECONDS + MAX_ROUND_S + 2 * MAX_CLOCK_SKEW_S)
        while self._seen:
            oldest = next(iter(self._seen))
            if self._seen[oldest][0] > forgotten and len(self._seen) <= MAX_SEEN:
                break
            del self._seen[oldest]


def slot_id(peer: str, group: SharedGroup) -> bytes:
    """16 bytes that tell the slots of all peers apart."""
    return hashlib.sha256(f"{peer}/{group.epoch}/{group.slot}".encode()).digest()[:16]


def content_id(peer: str, group: SharedGroup) -> bytes:
    """16 bytes that tell a group apart by its sender, its slot, its task and its texts, whatever batch it came in."""
    digest = hashlib.sha256(f"{peer}/{group.epoch}/{group.slot}/{group.task}".encode())
    for rollout in group.rollouts:
        for turn in rollout.turns:
            text = turn.text.encode()
            digest.update(len(text).to_bytes(4, "big") + text)
    return digest.digest()[:16]


def _check_judge(shared: SharedGroup, task: Task) -> None:
    """Raise RemoteProtocolError `judge` for a group that its sender judged otherwise than this node would: what earned
    there, and was sent for that, may earn nothing here. Nodes of protocol 1 name no judge, and knew `text` alone."""
    mine = task.kind, JUDGE if task.kind else 0
    if (shared.kind, shared.judge) == mine or (shared.judge == 0 and {shared.kind, task.kind} <= {"", "text"}):
        return
    theirs = f"{shared.kind or 'by its environment'}, version {shared.judge}"
    raise RemoteProtocolError("judge", f"judged as {theirs}; here {task.kind or 'by its environment'}, version {JUDGE}")


@dataclass(frozen=True)
class Admission:
    """Makes a stranger's group one of this node's own: its task regenerated, its texts encoded and judged here.

        name -> own task (assigned to that slot?) -> judged alike? -> own token ids -> own rewards -> signal?

    Nothing that the sender says of prompt, truth or reward is read.
    """

    swarm: str
    policy: Policy
    longest: int  # tokens of the longest answer that this node samples
    tasks: TaskSet

    def rebuild(self, peer: str, batch: RolloutBatch, shared: SharedGroup) -> Group:
        """The group to train on; `shared` is within the swarm's limits. Raises `RemoteProtocolError`: task, assignment,
        judge, prompt, length, text, error or zero."""
        task = self.tasks.assigned(shared.task, slot_key(self.swarm, peer, shared.epoch, shared.slot))
        _check_judge(shared, task)
        if prompt_digest(task.question) != shared.prompt:
            raise RemoteProtocolError("prompt", f"{task.name.environment} {task.name.index} is another question here")
        try:
            prompt_ids = self.policy.encode(self.tasks.prompt(task))
            prompt = self.tasks.prompt_text(prompt_ids, self.policy.text_of_prompt)
            begin = partial(self.tasks.dialogue, task, prompt, prompt_ids, self.policy.after_answer)
            dialogues = [begin() for _ in shared.rollouts]
            self._converse(dialogues, shared.rollouts, batch.tokenizer == self.policy.tokenizer_hash)
            rollouts = self.tasks.judged([each for each in dialogues if each.over], prompt)
        except RemoteProtocolError:
            raise
        except Exception as error:  # tokenizers and users' reward functions may raise anything at a stranger's text
            raise RemoteProtocolError("error", f"{type(error).__name__}: {error}") from error
        if not has_signal(rollouts):
            raise RemoteProtocolError("zero")
        return Group(
            task=msgspec.structs.replace(task, slot=(shared.epoch, shared.slot)),
            prompt_ids=prompt_ids,
            rollouts=rollouts,
            policy_version=shared.policy_version,
            peer=peer,
            created=batch.created,
        )

    def _converse(self, dialogues: Sequence[Dialogue], shared: Sequence[SharedRollout], same_tokenizer: bool) -> None:
        """Give the sender's answers, turn by turn, to dialogues that this node holds itself. A dialogue with an answer
        that this policy could not have sampled is not over then. Raises RemoteProtocolError: turns, length, text."""
        going = [*zip(dialogues, shared, strict=True)]
        impossible = False
        for number in range(max(len(rollout.turns) for rollout in shared)):
            said = [(dialogue, rollout.turns[number]) for dialogue, rollout in going]
            found, has_none = self._encoded(said, same_tokenizer)
            impossible |= has_none
            fitting = [(pair, turn) for pair, turn in zip(going, found, strict=True) if turn]
            for (dialogue, rollout), turn in fitting:
                dialogue.answer(turn)
                if number and prompt_digest(turn.asked) not in rollout.heard[number - 1 : number]:
                    raise RemoteProtocolError("prompt", f"the environment says something else here: {turn.asked!r}")
                if dialogue.over == (len(rollout.turns) > number + 1):
                    more = "goes on after its end" if dialogue.over else "lacks an answer"
                    raise RemoteProtocolError("turns", f"a dialogue of {len(rollout.turns)} turns {more}")
            going = [pair for pair, _ in fitting if not pair[0].over]
            if not going:
                break
        if (fit := sum(dialogue.over for dialogue in dialogues)) < 2:
            raise RemoteProtocolError("text" if impossible else "length", f"{fit} of {len(dialogues)} rollouts fit")

    def _encoded(
        self, said: Sequence[tuple[Dialogue, SharedTurn]], same_tokenizer: bool
    ) -> tuple[list[Turn | None], bool]:
        """Each answer in this policy's tokens, None if it has none or too many; and whether a text has none."""
        rooms = [min(self.longest, self.policy.max_positions - len(dialogue.ask() or ())) for dialogue, _ in said]
        pairs = [(answer, room) for (_, answer), room in zip(said, rooms, strict=True)]
        found = [self._as_sampled(*pair) if same_tokenizer else None for pair in pairs]
        unread = [
            i
            for i, turn in enumerate(found)
            if turn is None and not self.policy.is_surely_longer(pairs[i][0].text, rooms[i])
        ]
        encoded = self.policy.encode_completions([(pairs[i][0].text, pairs[i][0].finished) for i in unread])
        for i, ids in zip(unread, encoded, strict=True):
            if ids and len(ids) <= rooms[i]:
                found[i] = Turn(ids, [], pairs[i][0].finished, pairs[i][0].text)
        return found, not all(encoded)

    def _as_sampled(self, answer: SharedTurn, room: int) -> Turn | None:
        """The answer in the tokens that its sender drew; None if there are none, more than `room`, or ones of another
        text."""
        ids, data = answer.token_ids, answer.logprobs or b""
        if not ids or len(ids) > room or not self.policy.is_completion(ids, answer.text, answer.finished):
            return None
        logprobs = np.frombuffer(data, dtype="<f2") if len(data) == 2 * len(ids) else np.empty(0)
        sound = bool((np.isfinite(logprobs) & (logprobs <= 0)).all())
        return Turn(ids, logprobs.tolist() if sound else [], answer.finished, answer.text)
