"""A tokenizer whose library panics at one text, as a model's maker may plant it."""

from __future__ import annotations

from tokenizers import Regex, decoders, pre_tokenizers

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy

PATTERN = "(q+q+)+y"  # harmless until a text has many q and then no y
KILLER = "q" * 60 + "zy"


def panicking_policy(said: list[str] | None = None, encodes: bool = True, decodes: bool = True) -> Policy:
    """A starter of its own whose tokenizer panics at KILLER: when it encodes, when it decodes, or both."""
    policy = load_policy(PolicyConfig(), RolloutsConfig(max_new_tokens=16), lambda sentence: None)
    policy.report = (lambda sentence: None) if said is None else said.append
    core = policy.tokenizer.backend_tokenizer
    if encodes:
        split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([split, core.pre_tokenizer])
    if decodes:
        core.decoder = decoders.Sequence([core.decoder, decoders.Replace(Regex(PATTERN), "")])
    return policy
