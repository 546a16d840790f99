"""Limits on what a peer may send, each with its reason."""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------- task names

MAX_ENVIRONMENT_CHARS: Final = 64  # environment name: the longest in reasoning-gym 0.1.25 has 27 characters
CONFIG_HASH_CHARS: Final = 16
"""64 bits of sha256: a collision gains nothing, the receiver looks the hash up among its own sources."""
MAX_GENERATOR_CHARS: Final = 64  # package name and version, for example `reasoning-gym 0.1.25`
TASK_SEEDS: Final = 2**32  # seeds lie below this: the range that common random generators take
TASK_INDICES: Final = 2**31
"""Indices lie below this: far more items than any run draws, and a signed 32-bit integer still holds them."""

# ---------------------------------------------------------------- rollouts

MAX_BATCH_BYTES: Final = 512 * 1024
"""A signed rollout batch. py-libp2p drops RPCs above 1 MiB without a word; gossip adds headers and batches RPCs."""
MAX_GROUPS: Final = 64
"""Groups in a batch: a publisher flushes every second, and no node here samples more than this in one."""
MAX_BATCH_ADDRESSES: Final = 4
"""Addresses of its sender in a batch: two at which it listens and two through relays, some 500 bytes in all."""
MAX_TURNS: Final = 32  # turns of the policy in one dialogue, of which nodes of protocol 2 take one so far
MAX_ROLLOUTS: Final = 64  # rollouts in a group (at least two: one alone has no baseline)
MAX_TEXT_CHARS: Final = 32_768  # characters of a completion: some 8,000 tokens; checkers read no more of an answer
MAX_TOKENS: Final = 16_384  # token ids of a completion, where they ride along
CHARS_PER_TOKEN: Final = 8
"""Characters of an answer for each of its tokens, at most, in the mean: English prose and code have four or five."""
SLOTS: Final = 4096
"""Task slots of a peer in an epoch. A slot decides the task, so this bounds how much a peer can choose among."""
GROUPS_PER_SLOT: Final = 2
"""Groups of answers that a peer may publish to the task of one slot. A second pass over the slots gives a fast machine
8,192 tasks a minute, twice what any manifest allows; more would let a peer repeat the task that suits it."""
EPOCH_SECONDS: Final = 60  # length of an assignment epoch, counted from the Unix epoch
MAX_ROUND_S: Final = 3600.0
"""Longest time between the end of a task's epoch and the publication of answers to it: slow machines take their time,
and a peer cannot choose among more than the slots of that hour."""
MAX_CLOCK_SKEW_S: Final = 30.0
"""How far ahead of this node's clock a peer's clock may be. Home machines without NTP drift seconds a week."""

# ---------------------------------------------------------------- membership

MAX_CARD_BYTES: Final = 2048
"""A signed membership card. A bucket of 600 peers then stays at a quarter of the 4 MiB that a DHT reply can hold."""
CARD_TTL_S: Final = 60.0
"""A card expires after this time unless it is renewed, so a peer that is gone is forgotten within a minute."""
CARD_RENEWAL_S: Final = 15.0  # cards are renewed this often: three renewals may be lost
MAX_ADDRESSES: Final = 8  # addresses of each kind on a card. No usual machine has more.
MAX_ADDRESS_CHARS: Final = 192  # a relayed multiaddress carries two peer ids of 52 characters
MAX_NAME_CHARS: Final = 32  # a peer's name for people
MAX_FAMILY_CHARS: Final = 64  # a model family, for example `qwen2`
MAX_SHARDS: Final = 1024  # gossip shards of a swarm: with 32 peers on each, 32,000 peers
MEMBERSHIP_BUCKETS: Final = 16  # cards are spread over this many DHT keys, so that no dictionary outgrows a reply

# ---------------------------------------------------------------- what members declare

MAX_DECLARED_BYTES: Final = 512
"""What a peer declares of itself: three quarters of its card stay for addresses and the rest."""
MAX_DECLARED_KINDS: Final = 16  # kinds of task in it: those of most swarms, at some 20 bytes each
MAX_KIND_CHARS: Final = 64  # as long as the name of an environment or of a question file
MAX_DECLARED_ANSWERS: Final = 2**20
"""Answers to one kind of task in it. Readers compare shares, so a larger number would say nothing more."""
MAX_DECLARED_PEERS: Final = 8  # other peers in it, those whose groups were used most
MAX_VERSION_CHARS: Final = 32  # version of the software: `0.1.0`, or a development version with its commit

# ---------------------------------------------------------------- manifests, requests

MAX_MANIFEST_BYTES: Final = 64 * 1024  # a manifest as TOML: tasks, limits, a bootstrap list
MAX_REQUEST_BYTES: Final = 64 * 1024  # a request's payload
MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
"""A response's payload, unless the caller asks for less: a file of questions; weights have a way of their own."""
MAX_CHUNK_BYTES: Final = 1024 * 1024  # streams are written and read in pieces of at most this
MAX_HEAD_BYTES: Final = 4096  # the head of an exchange or of a message on a channel
MAX_BODY_BYTES: Final = 64 * 2**30
"""A body in an exchange. The receiver knows the size to expect, and allocates nothing for any other."""
MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""A body on a channel: 64 sequences of 1,024 tokens at a width of 1,024 in float32."""

# ---------------------------------------------------------------- stages

MAX_STAGES: Final = 256  # stages of a crew: one for each layer of the deepest models known
MAX_LAYERS: Final = 1024  # layers of a policy: several times those of the deepest models known
