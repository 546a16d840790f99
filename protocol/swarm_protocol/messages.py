"""Records that peers exchange. Their constraints are checked by `swarm_protocol.codec`, not on construction."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarm_protocol import limits

PROTOCOL_VERSION = 2
"""Major version. Nodes speak this version and the one before, and write the newest that all members understand
(`codec`). A record of any other version is ignored."""

Hash64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # sha256 in hexadecimal
Hash16 = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""First 64 bits of a sha256 in hexadecimal: enough to tell things apart, not to prove anything."""
Time = Annotated[float, Meta(ge=0, lt=2**40)]  # seconds since the Unix epoch
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Address = Annotated[str, Meta(max_length=limits.MAX_ADDRESS_CHARS, pattern=r"^/[!-~]+\Z")]
"""A multiaddress that ends in /p2p/<peer id>."""

StageNumber = Annotated[int, Meta(ge=0, lt=limits.MAX_STAGES)]
LayerNumber = Annotated[int, Meta(ge=0, le=limits.MAX_LAYERS)]


class TaskName(msgspec.Struct, frozen=True, order=True):
    """Name of a task: enough to regenerate the task on any machine. Nothing in it has to be trusted."""

    environment: Annotated[str, Meta(max_length=limits.MAX_ENVIRONMENT_CHARS, pattern=r"^[a-z0-9_]+\Z")]
    """Generator of the question, for example `gcd`; `jsonl` = a file of questions."""
    config: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{limits.CONFIG_HASH_CHARS}}}\Z")]
    """First hex digits of the sha256 of the environment's options as canonical JSON, or of the file."""
    generator: Annotated[str, Meta(max_length=limits.MAX_GENERATOR_CHARS, pattern=r"^[ -~]+\Z")]
    """Package and version that make the item: another version may make another item."""
    seed: Annotated[int, Meta(ge=0, lt=limits.TASK_SEEDS)]
    """0 for generators that seed item i with `seed + i`, so that no item has two names."""
    index: Annotated[int, Meta(ge=0, lt=limits.TASK_INDICES)]  # index of the item; for a file, the line, counted from 0


class SharedTurn(msgspec.Struct, frozen=True, array_like=True):
    """What a policy said in one turn, as text. No prompt, no truth, no reward: receivers have their own."""

    text: Annotated[str, Meta(max_length=limits.MAX_TEXT_CHARS)]  # decoded completion without special tokens
    finished: bool  # ended by itself, rather than cut off at the length limit
    token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=limits.MAX_TOKENS)] | None = None
    """Completion tokens, for receivers with the same tokenizer."""
    logprobs: Annotated[bytes, Meta(max_length=2 * limits.MAX_TOKENS)] | None = None
    """Log-probability of each token when sampled, little-endian float16."""


class SharedRollout(msgspec.Struct, frozen=True, array_like=True):
    """One dialogue about a task: what the policy said in each turn. What the environment says in between, receivers
    find out themselves."""

    turns: Annotated[list[SharedTurn], Meta(min_length=1, max_length=limits.MAX_TURNS)]
    heard: Annotated[list[Annotated[bytes, Meta(min_length=16, max_length=16)]], Meta(max_length=limits.MAX_TURNS)] = []
    """Before each turn but the first, the first 16 bytes of sha256 of what the environment said (normalised): receivers
    whose environment says something else refuse the group."""

    @classmethod
    def of(
        cls, text: str, finished: bool, token_ids: list[int] | None = None, logprobs: bytes | None = None
    ) -> SharedRollout:
        """A dialogue of one turn."""
        return cls([SharedTurn(text, finished, token_ids, logprobs)])


class SharedGroup(msgspec.Struct, frozen=True):
    """Sibling answers to one task that its sender was assigned."""

    task: TaskName
    epoch: Count  # assignment epoch: floor(Unix time / EPOCH_SECONDS) when the task was drawn
    slot: Annotated[int, Meta(ge=0, lt=limits.SLOTS)]
    """(peer, epoch, slot) decides the task: nobody can choose which tasks to publish answers to."""
    prompt: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """First 16 bytes of sha256(normalised question): mismatch detection and de-duplication only."""
    policy_version: Count  # optimiser updates behind the policy that sampled it
    rollouts: Annotated[list[SharedRollout], Meta(min_length=2, max_length=limits.MAX_ROLLOUTS)]
    kind: Annotated[str, Meta(max_length=limits.MAX_KIND_CHARS, pattern=r"^[a-z0-9-]*\Z")] = ""
    """Kind of answer by which its sender judged it, as `number`; empty = by the environment's own checker."""
    judge: Count = 0
    """Version of the sender's judge; 0 = the one of protocol 1, which knew one kind."""


class SharedSampling(msgspec.Struct, frozen=True):
    """The distribution that answers were drawn from."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_TOKENS)]
    temperature: Annotated[float, Meta(gt=0, le=100)]
    top_p: Annotated[float, Meta(gt=0, le=1)]


BatchAddresses = Annotated[list[Address], Meta(max_length=limits.MAX_BATCH_ADDRESSES)]
"""Where the sender of a batch can be reached. A batch comes through peers that may be gone the next moment, perhaps
before its sender's card is found: then the sender is dialled here."""


class RolloutBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """A batch that a peer publishes about once a second. Its sender is the peer that signed it."""

    protocol: Count
    swarm: Hash64
    sequence: Count  # rises with each batch of a peer's process; for people, nothing depends on it
    created: Time
    fingerprint: Hash16
    """Fingerprint of the sender's policy when the batch was sent. Other weights have another fingerprint. For
    people."""
    tokenizer: Hash16
    sampling: SharedSampling
    groups: Annotated[list[SharedGroup], Meta(min_length=1, max_length=limits.MAX_GROUPS)]
    addresses: BatchAddresses = []


class GroupOfBefore(msgspec.Struct, frozen=True):
    """A `SharedGroup` of protocol 1: an answer is one turn, and there is one kind of answers."""

    task: TaskName
    epoch: Count
    slot: Annotated[int, Meta(ge=0, lt=limits.SLOTS)]
    prompt: Annotated[bytes, Meta(min_length=16, max_length=16)]
    policy_version: Count
    rollouts: Annotated[list[SharedTurn], Meta(min_length=2, max_length=limits.MAX_ROLLOUTS)]


class BatchOfBefore(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `RolloutBatch` of protocol 1."""

    protocol: Count
    swarm: Hash64
    sequence: Count
    created: Time
    fingerprint: Hash16
    tokenizer: Hash16
    sampling: SharedSampling
    groups: Annotated[list[GroupOfBefore], Meta(min_length=1, max_length=limits.MAX_GROUPS)]
    addresses: BatchAddresses = []  # nodes of protocol 1 read past them


class CrewCard(msgspec.Struct, frozen=True, omit_defaults=True, rename={"held": "seats"}):
    """The crew of a peer, on its card: enough for newcomers to find the crew."""

    id: Hash16
    """Equal for the peers of one crew. It is derived from the name, which stays secret (see `swarm_protocol.crew`)."""
    architecture: Hash16  # equal for peers that hold stages of one policy
    count: Annotated[int, Meta(ge=1, le=limits.MAX_STAGES)]  # stages that the policy is cut into
    held: Annotated[tuple[StageNumber, ...], Meta(max_length=limits.MAX_STAGES)] = ()
    """Stages that the peer holds; the one that holds stage 0 leads the crew. On the wire, the name is `seats`."""
    term: Count = 0  # term of the leader that the peer follows, or is


class DeclaredKind(msgspec.Struct, frozen=True, array_like=True):
    """What a peer says of its latest answers to one kind of task."""

    kind: Annotated[str, Meta(max_length=limits.MAX_KIND_CHARS, pattern=r"^[A-Za-z0-9_./:-]+\Z")]
    """Label of the kind of task, as the swarm's tasks name it."""
    answers: Annotated[int, Meta(ge=1, le=limits.MAX_DECLARED_ANSWERS)]
    right: Annotated[int, Meta(ge=0, le=limits.MAX_DECLARED_ANSWERS)]  # readers take no more than `answers`


class DeclaredUse(msgspec.Struct, frozen=True, array_like=True):
    """What a peer says of the groups of one other peer that it trained on."""

    peer: Hash16  # `swarm_protocol.topics.short_hash` of that peer's id
    groups: Count


class Declared(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says of itself, for people: nobody checks it, and no node trains by it. Totals are of its process."""

    since: Time = 0.0  # when its process joined the swarm
    version: Annotated[str, Meta(max_length=limits.MAX_VERSION_CHARS, pattern=r"^[A-Za-z0-9.+-]*\Z")] = ""
    """Version of its software."""
    kinds: Annotated[list[DeclaredKind], Meta(max_length=limits.MAX_DECLARED_KINDS)] = []
    """Its latest answers by kind of task, the most frequent kinds first."""
    pass_1: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Its latest held-out pass@1 since it began to train."""
    questions: Annotated[int, Meta(ge=0, le=2**31)] = 0  # held-out questions behind it
    used: Count = 0  # groups of other peers that it trained on
    used_of: Annotated[list[DeclaredUse], Meta(max_length=limits.MAX_DECLARED_PEERS)] = []
    """Those of them that came from the peers whose groups it used most."""


class PeerCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A peer's description of itself, renewed in the DHT every few seconds. The peer is the one that signed it."""

    protocol: Count
    swarm: Hash64
    created: Time
    name: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9._-]+\Z")]
    roles: Annotated[list[Literal["trainer", "bootstrap", "relay"]], Meta(max_length=3)]
    addresses: Annotated[list[Address], Meta(max_length=limits.MAX_ADDRESSES)] = []  # of the peer's DHT and streams
    gossip: Annotated[list[Address], Meta(max_length=limits.MAX_ADDRESSES)] = []  # of the peer's gossip process
    gossip_id: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9]*\Z")] = ""
    """Peer id of its gossip process: a fresh key every start, which this card binds to the peer."""
    shards: Annotated[list[Annotated[int, Meta(ge=0, lt=limits.MAX_SHARDS)]], Meta(max_length=limits.MAX_SHARDS)] = []
    """Gossip shards it subscribes to; empty = all."""
    cohort: Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")] = ""
    """Peers of one cohort can average weights; empty = none."""
    family: Annotated[str, Meta(max_length=limits.MAX_FAMILY_CHARS, pattern=r"^[ -~]*\Z")] = ""
    """Model architecture, for example `llama`."""
    tokenizer: Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")] = ""
    policy_version: Count = 0
    speed: Annotated[float, Meta(ge=0, lt=1e12)] = 0.0  # sampled tokens a second
    stages: tuple[Count, Count] | None = None
    """First and last layer that it holds, of a policy spread over several peers."""
    crew: CrewCard | None = None  # `None` = it holds its policy alone
    speaks: Count = 0  # the newest protocol version that it understands, if this card is written in an older one
    declared: Declared | None = None
    """What it says of its success; `None` = it says nothing, or the rest of the card leaves no room for it."""
