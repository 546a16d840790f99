"""Tiny models and adapters, each as people's reports of broken ones describe it. Random weights, 30,000 parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BEGUN = "assistant\n' }}{% endif %}"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>" + BEGUN
)
THINKING = TEMPLATE.replace(BEGUN, "assistant\n<think>\n' }}{% endif %}")
SWITCH = TEMPLATE.replace(
    BEGUN, BEGUN.replace("' }}", "' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}", 1)
)
PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
TRAINED_ON = ["What is 3+4? Item 12: what is the answer", "<answer>7</answer> think about it", "0 1 2 3 4 5 6 7 8 9"]


def tokenizer(
    special: Sequence[str] = SPECIAL, added: Sequence[str] = (), template: str = TEMPLATE
) -> PreTrainedTokenizerFast:
    """A tokenizer of some 300 tokens, with tokens `added` behind them."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TRAINED_ON * 3, trainer)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    made.chat_template = template
    return made


def put(folder: Path, rows: int = 0, **options: Any) -> Path:
    """A model with a `tokenizer` of these options; `rows` of its embedding, by default one for each token."""
    made, positions = tokenizer(**options), 512
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=rows or len(made),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def altered(folder: Path, name: str, **values: Any) -> Path:
    """The model or adapter in `folder`, with other values in its file `name`."""
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """The model in `folder`, with its tensors changed."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def _spoilt(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    return tensors


def _infinite_embedding(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors["model.embed_tokens.weight"][1, 1] = torch.inf
    return tensors


def _huge(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors["model.norm.weight"].fill_(1e38)
    tensors["model.embed_tokens.weight"].mul_(1e6)
    return tensors


def _prefixed(prefix: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def _without_a_shard(folder: Path) -> Path:
    put(folder)
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()
    return folder


def _cut_off(folder: Path) -> Path:
    file = put(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def _only_gguf(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "tiny-q4_k_m.gguf").write_bytes(b"GGUF" + bytes(200))
    return folder


def _own_code(folder: Path) -> Path:
    (put(folder) / "modeling_my.py").write_text("raise SystemExit('ran')\n")
    return altered(folder, "config.json", model_type="my_own", auto_map={"AutoConfig": "configuration_my.MyConfig"})


def _no_tokenizer(folder: Path) -> Path:
    for file in [*put(folder).glob("*token*"), folder / "chat_template.jinja"]:
        file.unlink()
    return folder


def _word_pieces(folder: Path) -> Path:
    """The pieces are another model's: the token for what they lack is not among them."""
    file = put(folder) / "tokenizer.json"
    parts = json.loads(file.read_text())
    pieces = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    parts["model"] = pieces | {"max_input_chars_per_word": 100, "vocab": parts["model"]["vocab"]}
    file.write_text(json.dumps(parts))
    return folder


def _named_templates(folder: Path) -> Path:
    (put(folder) / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}]
    return altered(folder, "tokenizer_config.json", chat_template=named)


def adapter(folder: Path, base: object = None, **lora: Any) -> Path:
    """An adapter of a model beside it, called `base`; its config names the base as given, else by its whole path."""
    place = folder.parent / "base"
    if not place.is_dir():
        put(place)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **lora)
    get_peft_model(LlamaForCausalLM.from_pretrained(place), config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    named = str(place.resolve()) if base is None else base
    return altered(folder, "adapter_config.json", base_model_name_or_path=None if base == "" else named)


MLX = {"group_size": 64, "bits": 4}
ROPE = {"rope_type": "longrope", "rope_theta": 1e308, "short_factor": [1e-300] * 8, "long_factor": [1e-300] * 8}
"""Angles of positions that are not finite."""
MODELS: dict[str, Callable[[Path], object]] = {
    "ok": put,
    "thinks": lambda folder: put(folder, template=THINKING),
    "switches": lambda folder: put(folder, template=SWITCH, added=("<think>", "</think>")),
    "parts": lambda folder: put(folder, template=PARTS),
    "named_templates": _named_templates,
    "tags_are_special": lambda folder: put(folder, special=(*SPECIAL, "<answer>", "</answer>", "<think>", "</think>")),
    "tokens_added": lambda folder: put(folder, rows=len(tokenizer()), added=("<doc>", "</doc>", "<cite>")),
    "template_has_added": lambda folder: put(
        folder, rows=len(tokenizer()), added=("<think>", "</think>"), template=THINKING
    ),
    "shard_missing": _without_a_shard,
    "cut_off": _cut_off,
    "gguf_only": _only_gguf,
    "mlx": lambda folder: altered(put(folder), "config.json", quantization=MLX, quantization_config=MLX),
    "mlx_old": lambda folder: altered(put(folder), "config.json", quantization=MLX),
    "fp8": lambda folder: altered(put(folder), "config.json", quantization_config={"quant_method": "fp8"}),
    "nan": lambda folder: weights(put(folder), _spoilt),
    "infinite": lambda folder: weights(put(folder), _infinite_embedding),
    "huge": lambda folder: weights(put(folder), _huge),
    "own_code": _own_code,
    "rope": lambda folder: altered(put(folder), "config.json", rope_parameters=ROPE),
    "word_pieces": _word_pieces,
    "unknown_type": lambda folder: altered(put(folder), "config.json", model_type="of_tomorrow"),
    "no_tokenizer": _no_tokenizer,
    "compiled": lambda folder: weights(put(folder), _prefixed("_orig_mod.")),
    "parallel": lambda folder: weights(put(folder), _prefixed("module.")),
    "base_gone": lambda folder: adapter(folder, "/home/alex/models/ok"),
    "base_relative": lambda folder: adapter(folder, "./ok"),
    "base_beside": lambda folder: adapter(folder, "../base"),
    "base_unnamed": lambda folder: adapter(folder, ""),
    "base_of_4_bits": lambda folder: adapter(folder, "unsloth/qwen2.5-0.5b-instruct-unsloth-bnb-4bit"),
    "of_an_adapter": lambda folder: adapter(folder, str(adapter(folder.parent / "first").resolve())),
    "saves_embedding": lambda folder: adapter(folder, modules_to_save=["embed_tokens", "lm_head"]),
}
"""Name -> how it is made in a directory."""
