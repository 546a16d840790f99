"""How far rounding moves a model, and how far right and wrong fast paths are from its own numbers.

    python -m benchmarks.rounding --model DIR [--quick]      # --quick: the starter; nothing is stored

In bfloat16, nats a token in the mean over what the model itself would sample (`swarm_node.policy.rounding`), on the
tokens of text that a node tries its paths on when it loads a model, and on random tokens. `largest`: the largest
difference among all entries, which judged until a trained model came. `allowed` and `judged` are by the node's rule.
A minute for a model of 135 million parameters, where the processor has bfloat16.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.common import table, write
from swarm_node.config import PolicyConfig
from swarm_node.policy.engines.native import Decoder
from swarm_node.policy.loading import load_base, load_tokenizer, prepare
from swarm_node.policy.policy import Policy
from swarm_node.policy.probes import LENGTHS, ProbeText, packed_row
from swarm_node.policy.rounding import OwnNumbers

COLUMNS = ["text", "computed by", "nats", "allowed", "largest", "judged"]
Row = tuple[str, str, float, float, float, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows = measure("starter" if args.quick else args.model)
    print(table(COLUMNS, [[each if isinstance(each, str) else f"{each:.3g}" for each in row] for row in rows]))
    if not args.quick:
        write("rounding", {"model": args.model, "rows": rows})


@torch.no_grad()
def measure(model: str) -> list[Row]:
    """Rows of the table."""
    config = PolicyConfig(model=model, dtype="bfloat16", device="cpu")
    loaded, _ = load_base(prepare(config))
    policy = Policy(loaded.eval(), load_tokenizer(config), config)
    exact = copy.deepcopy(policy.model).float()
    random = torch.Generator().manual_seed(1)
    drawn = ProbeText(*(torch.randint(policy.vocabulary, (n,), generator=random).tolist() for n in LENGTHS))
    rows = []
    for name, probe in (("words", ProbeText.of(policy)), ("random", drawn)):
        one, two = (OwnNumbers.of(policy, probe.prompt + tail) for tail in (probe.one, probe.two))
        start = len(probe.prompt) - 1
        rows += [_row(name, by, one, found, start) for by, found in _computed(policy, exact, probe, one)]
        rows += [_row(name, by, two, found, start + 1) for by, found in _packed(policy, probe)]
    return rows


def _row(name: str, by: str, own: OwnNumbers, found: Tensor, start: int) -> Row:
    """How far the logits of the positions from `start` on are from the model's own."""
    judged = own.judge(found, start)
    largest = (own.logits[start:].float().log_softmax(-1) - found.float().log_softmax(-1)).abs().max()
    return name, by, judged.found, judged.allowed, float(largest), "taken" if judged.agrees else "refused"


def _packed(policy: Policy, probe: ProbeText) -> Iterator[tuple[str, Tensor]]:
    """(how they were computed, logits of the second answer in one row with the first)"""
    ids, right = packed_row(probe, policy.device)
    leaky = {"attention_mask": torch.ones_like(right["attention_mask"]).tril()}
    onward = {"position_ids": torch.arange(len(ids))[None]}
    for by, wrong in (("", {}), (", which see the first answer", leaky), (", at positions behind the first", onward)):
        logits = policy.model(input_ids=torch.tensor([ids]), use_cache=False, **right | wrong).logits[0]
        yield f"packed rows{by}", logits[-len(probe.two) :]


def _computed(policy: Policy, exact: nn.Module, probe: ProbeText, own: OwnNumbers) -> Iterator[tuple[str, Tensor]]:
    """(how they were computed, logits of the answer)"""
    start = len(probe.prompt) - 1
    yield "itself in float32", exact(torch.tensor([probe.prompt + probe.one])).logits[0, start:]
    yield "itself with random rounding", own.moved[0, start:]
    yield "the native engine", _native(policy.model, probe)
    for by, factor in (("rotary frequencies of a base a tenth as large", 0.1), ("of a base a half as large", 0.5)):
        wrong = copy.deepcopy(policy.model)
        frequencies = wrong.model.rotary_emb.inv_freq
        frequencies.mul_(factor ** -(torch.arange(len(frequencies)) / len(frequencies)))
        yield f"the native engine, {by}", _native(wrong, probe)
    wrong = copy.deepcopy(policy.model)
    for layer in wrong.model.layers:
        layer.self_attn.q_proj.weight.mul_(1.2)
    yield "the native engine, scores of attention a fifth too large", _native(wrong, probe)
    most = own.logits[start:].abs().max()
    yield "the model, logits with a soft cap at their largest", most * (own.logits[start:] / most).tanh()


def _native(model: nn.Module, probe: ProbeText) -> Tensor:
    """Logits of the first answer by the native engine."""
    decoder = Decoder(model, "joined")
    cache = decoder.slice.cache([len(probe.prompt)], 1, len(probe.one))
    logits = [decoder.prefill(cache, [probe.prompt])]
    logits += [decoder.forward(cache, torch.tensor([token]), step) for step, token in enumerate(probe.one)]
    return torch.cat(logits)


if __name__ == "__main__":
    main()
