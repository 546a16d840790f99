"""Sampled tokens per CPU second: the native engine, our transformers engine, and Hugging Face `generate`.

    python -m benchmarks.decode [--repeats 5] [--seed 0]

0.44M-parameter Llama, random weights, one thread; every completion runs to its full length (no end token), so that
all three do the same work. Our engines record log-probabilities as they must for training; `generate` does not.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import interleaved, median, table, write
from swarm_node.policy.engines.base import uniforms
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.starter import build_model
from swarm_node.types import Sampling

GROUP = 8
SETTINGS = [(32, 32, 24), (64, 32, 24), (32, 64, 24), (64, 64, 24), (64, 32, 100)]
"""(completions at once, new tokens each, prompt tokens)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = build_model(vocabulary=384, layers=2, hidden=128, seed=args.seed).eval()
    never = [384]  # outside the vocabulary
    figures, rows = [], []
    for batch, new, length in SETTINGS:
        prompts = torch.randint(3, 384, (batch // GROUP, length)).tolist()
        ids = torch.tensor([p for p in prompts for _ in range(GROUP)])
        uniform, sampling = uniforms(list(range(len(prompts))), GROUP, new), Sampling(new)

        def generate(ids: torch.Tensor = ids, new: int = new) -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
            )

        shared = (prompts, GROUP, sampling, uniform, tuple)
        times = interleaved(
            {
                "native": lambda shared=shared: NativeEngine(model, never, 0).decode(*shared),
                "fallback": lambda shared=shared: TransformersEngine(model, never, 0).decode(*shared),
                "generate": generate,
            },
            args.repeats,
        )
        speed = {name: batch * new / median(t) for name, t in times.items()}
        figures.append({"batch": batch, "new_tokens": new, "prompt": length, "tok_s": speed, "seconds": times})
        ratio = speed["native"] / speed["generate"]
        rows.append([batch, new, length, *(f"{speed[n]:,.0f}" for n in speed), f"{ratio:.2f}x"])
    print(table(["rows", "new", "prompt", "native", "fallback", "HF generate", "native / generate"], rows))
    write("decode", {"seed": args.seed, "settings": figures})


if __name__ == "__main__":
    main()
