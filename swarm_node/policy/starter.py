"""The starter policy: a tiny Llama that answers some questions of a few arithmetic tasks.

With it, reinforcement learning has something to improve on any machine, offline, within minutes. Recipe
(measured on two CPU cores): byte-level BPE with digits apart, 438,912 parameters, answer-only cross-entropy with
AdamW, three learning-rate segments that each decay to zero; about a minute for 500 steps. It learns from training
questions only: held-out ones (by content) stay unseen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm_node.policy import tokenizing
from swarm_protocol.answer_form import WRITTEN, AnswerForm

PAD, SEP, EOS = "<pad>", "<sep>", "<eos>"
FORMS: dict[AnswerForm, float] = {"any": 0.85, "tags": 0.1, "boxed": 0.05}
"""Forms of answers, with their shares of the examples: a policy learns a form by reward only if it sometimes writes it.
"""
VOCABULARY = 384
HEAD_DIM = 32
MAX_POSITIONS = 256
BATCH = 64
SEGMENTS = ((0.3, 3e-3, 30), (0.3, 2e-3, 10), (0.4, 2e-3, 10))
"""(share of the steps, peak learning rate, warm-up steps); the rate falls linearly to 5 % within each."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] | trim }}"
    + SEP
    + "{% elif message['role'] == 'assistant' %}{{ message['content'] }}"
    + EOS
    + "{% endif %}{% endfor %}"
)


def in_some_form(answer: str, rng: random.Random) -> str:
    """The answer in a form that is drawn by its share."""
    (form,) = rng.choices(list(FORMS), list(FORMS.values()))
    return WRITTEN[form].format(answer)


def train_starter(
    examples: Sequence[tuple[str, str]],
    layers: int = 2,
    hidden: int = 128,
    steps: int = 350,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train a starter on (question, answer) pairs; `on_step` is told the step and the smoothed loss."""
    tokenizer = build_tokenizer([text for example in examples for text in example])
    model = build_model(len(tokenizer), layers, hidden, seed)
    rng = random.Random(seed)
    batches = _batches(examples, tokenizer, rng)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    smoothed = 0.0
    order: list[int] = []
    for step, rate in enumerate(_rates(steps)):
        if not order:
            order = rng.sample(range(len(batches)), len(batches))
        ids, labels = batches[order.pop()]
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smoothed = loss.item() if step == 0 else 0.98 * smoothed + 0.02 * loss.item()
        on_step(step + 1, smoothed)
    return model.eval(), tokenizer


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which digits and punctuation stand alone and letters with spaces may merge across words."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^A-Za-z \n]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=max(2, len(texts) // 200),
        special_tokens=[PAD, SEP, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, bos_token=SEP, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(vocabulary: int, layers: int, hidden: int, seed: int) -> LlamaForCausalLM:
    """A Llama of the usual proportions with fresh weights (tied embeddings)."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=int(8 * hidden / 3) // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _batches(
    examples: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input ids, labels) [BATCH, T] of examples of like length; labels are -100 outside answers."""
    rows = []
    for question, answer in examples:
        prompt, target = tokenizing.encode(tokenizer, [question.strip() + SEP, answer + EOS], special=True)
        if len(prompt) + len(target) <= MAX_POSITIONS:
            rows.append((prompt, target))
    rows.sort(key=lambda row: ((len(row[0]) + len(row[1])) // 8, rng.random()))
    batches = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        ids = [torch.tensor(prompt + target) for prompt, target in part]
        labels = [torch.tensor([-100] * len(prompt) + target) for prompt, target in part]
        batches.append(
            (pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100))
        )
    return batches


def _rates(steps: int) -> list[float]:
    rates: list[float] = []
    for i, (share, peak, warmup) in enumerate(SEGMENTS):
        n = steps - len(rates) if i == len(SEGMENTS) - 1 else round(share * steps)
        rates += [peak * min(1.0, (k + 1) / warmup) * max(0.05, 1 - k / n) for k in range(n)]
    return rates
