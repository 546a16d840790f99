"""A program that dequantises a GGUF file into a directory in Hugging Face layout; `store` runs it as a child process.

    python converting.py FILE.gguf DIR … --reads both from its arguments--> DIR has the model, or a sentence on standard
    output says why not

transformers' own loader reads the file, in a process of its own: its memory goes back to the system, and neither a
broken file nor the libraries' settings touch the node. The directory depends on nothing but the file and the versions
of the libraries, so all that names a version or this machine is left out of it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from swarm_node.errors import UserError
from swarm_node.policy import vetting
from swarm_node.policy.gguf_files.header import AGAIN, read_header
from swarm_node.policy.policy import save
from swarm_node.say import in_short

LACKING = 1.25  # times the values of a file's tensors, above which it is not read to say which ones are missing
DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
"""Ways to split a text, by llama.cpp's names, that are GPT-2's with each digit apart. transformers knows GPT-2's alone
of these, which differs after several blanks."""
OF_THIS_MACHINE = {
    "config.json": ("transformers_version", "_name_or_path", "_model_name_or_path"),
    "generation_config.json": ("transformers_version",),
    "tokenizer_config.json": ("is_local", "local_files_only"),
}
"""Keys of the files that are written, which say nothing of the model."""


def convert(file: Path, out: Path) -> None:
    """Write the model of a GGUF file to the directory `out`, in float32. Raises UserError, or anything of the libraries
    that read it."""
    header = read_header(file)
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    check_size(file, header.values, where)
    with vetting.bounded_modules(str(file)):
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **where
        )
    if found["missing_keys"] or found["mismatched_keys"]:
        lacking = sorted([*found["missing_keys"], *(str(key[0]) for key in found["mismatched_keys"])])
        raise UserError(f"it lacks weights that its header asks for, for example {lacking[0]}")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    if header.splitting in DIGITS_APART:
        split_digits(tokenizer)
    model.hf_quantizer = None  # `save_pretrained` refuses what it thinks is quantised
    model.config.__dict__.pop("quantization_config", None)
    save(model, tokenizer, out)
    for name, keys in OF_THIS_MACHINE.items():
        leave_out(out / name, keys)


def check_size(file: Path, values: int, where: dict[str, Any]) -> None:
    """Raise UserError if the entries of a file's header ask for a model with many more values than its tensors have:
    the library makes those that are lacking, at random, before it says so. `where` goes to its `from_pretrained`."""
    config = AutoConfig.from_pretrained(file.parent, **where)
    with torch.device("meta"), vetting.bounded_modules(str(file)):
        asked = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if asked > LACKING * values:
        raise UserError(f"its header asks for {asked:,} values, and its tensors have {values:,}: {AGAIN}")


def split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Split each text at each digit, before it is split as GPT-2 does."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def leave_out(file: Path, keys: tuple[str, ...]) -> None:
    """Take keys out of a JSON file, which may not be there."""
    if file.is_file():
        found = {key: value for key, value in json.loads(file.read_text("utf-8")).items() if key not in keys}
        file.write_text(json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _end_with_parent() -> None:
    """End this process when its standard input closes: nobody waits for the model then."""
    os.read(sys.stdin.fileno(), 1)  # not `sys.stdin.read`, whose lock Python needs at its end
    os._exit(1)


def main() -> int:
    """Convert the file of the first argument into the directory of the second."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    once = lru_cache(gguf.GGUFReader)
    vars(gguf)["GGUFReader"] = once  # transformers parses the one header three times, for seconds each
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except MemoryError:
        print("there is not enough memory to dequantise it")
    except Exception as error:  # hundreds of ways in which the libraries fail over a stranger's file
        detail = in_short(error, 300)
        print(detail if isinstance(error, UserError) else f"transformers says: {type(error).__name__}: {detail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
