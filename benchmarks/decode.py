"""Sampled tokens a second: the native engine, our transformers engine, `generate`, and its continuous batching.

    python -m benchmarks.decode [--sizes 0.44M 3M 0.5B] [--rows 1 16 64] [--new 32 256] [--repeats 3] [--threads 1]
    python -m benchmarks.decode --quick          # the smallest size, few tokens; nothing is stored

Random weights, prompts of 24 tokens, groups of eight; every completion runs to its full length (no end token), so that
all do the same work. 0.5B has the shape of Qwen2.5-0.5B in bfloat16. Our engines record log-probabilities as they must
for training; the others do not. `limit` estimates what this machine could do: the weights are read from memory once a
step, or multiplied with all rows, whichever takes longer at the rates measured here; small weights stay in caches.
Seconds are wall time: leave the machine idle. Each row is kept as soon as it is there, beside those of
the same day and machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen2ForCausalLM

from benchmarks.common import RESULTS, machine, median, table, write_row
from benchmarks.real_model import config_of
from swarm_node.policy.engines.base import uniforms
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.engines.products import best_s, layout_of, packed_layout
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.packed import values_of
from swarm_node.policy.starter import build_model
from swarm_node.types import Sampling

SIZES = {"0.44M": (2, 128), "3M": (4, 256)}
"""Layers and width of the small ones."""
ALL = *SIZES, "0.5B"
PROMPT, VOCABULARY = 24, 384
FOLDER = RESULTS / "decode"


def model_of(size: str) -> PreTrainedModel:
    if size in SIZES:
        layers, hidden = SIZES[size]
        return build_model(vocabulary=VOCABULARY, layers=layers, hidden=hidden, seed=0).eval()
    return Qwen2ForCausalLM(config_of(size)).to(torch.bfloat16).eval()


@dataclass(frozen=True)
class Limit:
    """What this machine could do with a model, its keys and values not counted."""

    values: int  # of the model
    read_s: float  # seconds to read its weights from memory once
    operations_s: float  # of products in its dtype, multiplications and additions

    def pass_s(self, rows: int, products: int = 1) -> float:
        """Seconds of a pass over `rows` tokens with so many products for each weight."""
        return max(self.read_s, 2 * self.values * rows * products / self.operations_s)


def limit_of(model: PreTrainedModel) -> Limit:
    """Measured on the model's device; on a CPU with as many threads as torch has."""
    on_gpu = model.device.type == "cuda"
    side = 8192 if on_gpu else 2048
    memory = torch.ones(2**27, device=model.device)  # 512 MiB: more than any cache
    square = torch.randn(side, side, device=model.device).to(model.dtype)
    ways: list[Callable[[], object]] = [lambda: square @ square]
    if not on_gpu and (model.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(square, square, None, "none", [], ""))

    def seconds(work: Callable[[], object]) -> float:
        return best_s(lambda: (work(), torch.cuda.synchronize())) if on_gpu else best_s(work)

    read_s = seconds(memory.sum) / memory.nbytes * sum(p.nbytes for p in model.parameters())
    return Limit(sum(map(values_of, model.parameters())), read_s, 2 * side**3 / min(map(seconds, ways)))


def contestants(model: PreTrainedModel, rows: int, new: int) -> dict[str, Callable[[], object]]:
    """Name -> what samples `rows` completions of `new` tokens."""
    n = min(rows, 8)
    prompts = torch.randint(3, VOCABULARY, (rows // n, PROMPT)).tolist()
    ids = torch.tensor([p for p in prompts for _ in range(n)])
    never, pad = [model.config.vocab_size], 0  # an end token outside of the vocabulary
    shared = prompts, n, Sampling(new), uniforms(list(range(len(prompts))), n, new), tuple
    drawn: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    length: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new}
    layout = layout_of(model)
    if layout.name == "own":  # a run with room for a copy takes this one
        layout = packed_layout(model)
    blocks = {"num_blocks": 2 * rows + 8, "max_batch_tokens": max(256, 2 * rows), "use_cuda_graph": False}

    def generate() -> object:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **drawn, **length)

    def continuous() -> object:
        settings = GenerationConfig(max_new_tokens=new, eos_token_id=never, pad_token_id=pad, **drawn)
        batching = ContinuousBatchingConfig(**blocks)
        found = model.generate_batch(ids.tolist(), generation_config=settings, continuous_batching_config=batching)
        assert all(len(one.generated_tokens) == new for one in found.values())
        return found

    return {
        "native": lambda: NativeEngine(model, never, pad, layout).decode(*shared),
        "transformers engine": lambda: TransformersEngine(model, never, pad).decode(*shared),
        "generate": generate,
        "continuous batching": continuous,
    }


def measure(size: str, rows: Sequence[int], lengths: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Seconds of each contestant, in turn after a short warm-up, for each number of rows and tokens."""
    model = model_of(size)
    limit = limit_of(model)
    for batch in rows:
        for warm in contestants(model, batch, 2).values():
            warm()
        for new in lengths:
            times: dict[str, list[float]] = {}
            for _ in range(repeats):
                for name, work in contestants(model, batch, new).items():
                    times.setdefault(name, []).append(best_s(work, 1))
            row = {
                "size": size,
                "rows": batch,
                "new": new,
                "limit_tok_s": batch / limit.pass_s(batch),
                "seconds": times,
            }
            print(*line_of(row), sep="  ", flush=True)
            yield row


def keep(row: dict[str, Any], threads: int) -> list[dict[str, Any]]:
    """Write a row to the file of its size; all rows that are there."""
    path = FOLDER / f"{row['size']}.json"
    older = json.loads(path.read_text()) if path.exists() else {}
    same = (machine(), threads) == (older.get("machine"), older.get("threads"))
    rows = [r for r in older.get("rows", []) if same and (r["rows"], r["new"]) != (row["rows"], row["new"])] + [row]
    rows.sort(key=lambda r: (r["rows"], r["new"]))
    write_row(path, {"machine": machine(), "threads": threads, "rows": rows}, indent=1)
    return rows


def line_of(row: dict[str, Any]) -> list[str]:
    """A line of the table: tokens a second, and two ratios."""
    speeds = {name: row["rows"] * row["new"] / median(times) for name, times in row["seconds"].items()}
    native = speeds["native"]
    ratios = f"{native / speeds['generate']:.1f}x", f"{native / row['limit_tok_s']:.0%}"
    head = row["size"], str(row["rows"]), str(row["new"])
    return [*head, *(f"{speed:,.0f}" for speed in (*speeds.values(), row["limit_tok_s"])), *ratios]


COLUMNS = ["model", "rows", "new", "native", "transformers engine", "generate", "continuous batching", "limit"]


def report(rows: list[dict[str, Any]]) -> str:
    return table([*COLUMNS, "native / generate", "of the limit"], [line_of(row) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--new", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.quick:
        print(report(list(measure("0.44M", [1, 16], [8], 1))))
        return
    for size in args.sizes:
        rows: list[dict[str, Any]] = []
        for row in measure(size, args.rows, args.new, args.repeats):
            rows = keep(row, args.threads)
        print(report(rows))


if __name__ == "__main__":
    main()
