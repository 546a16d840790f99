"""Would members save bytes if weights travelled as what changed since a base that both ends have?

    python -m benchmarks.patches [--rates 5e-4 1e-6] [--updates 1 10 100] [--seed 0] [--quick]

The starter is trained by GRPO at each learning rate (all weights, 32 groups of 8 answers). After some updates its
weights are the base; 1, 10, 100 updates later they are compared with it, in two lossless ways:

    bf16      the values whose rounding to bfloat16 changed (PULSE, arXiv 2602.03839): gaps between their places as
              varints, then the values, both through zlib. It serves a receiver that computes with bfloat16 alone.
    float32   d = bits(new) - bits(base) as integers in the order of floats, zigzag, byte by byte, through zlib. It
              serves a receiver that trains on: its weights are float32, in averaging as in replicas of a stage.

Each patch is undone and compared with the new weights, bit for bit. Bytes are shares of the whole in the same format.
"""

from __future__ import annotations

import argparse
import random
import time
import zlib

import numpy as np
import torch

from benchmarks.common import table, write

LEVEL = 1  # of zlib: the fastest
BEFORE = 20  # updates before the base, after which Adam's moments are those of a run


def bits(weights: torch.Tensor, bf16: bool) -> np.ndarray:
    """The weights' bits, as unsigned integers of 16 or 32 bits."""
    if bf16:
        return weights.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return weights.view(torch.int32).numpy().view(np.uint32)


def varints(numbers: np.ndarray) -> bytes:
    """Numbers below 2**35, 7 bits a byte, the lowest first; the top bit says that more follow."""
    parts = np.stack([(numbers >> (7 * k)) & 0x7F for k in range(5)], 1).astype(np.uint8)
    length = 1 + sum((numbers >= 2 ** (7 * k)).astype(int) for k in range(1, 5))
    there = np.arange(5)[None] < length[:, None]
    more = np.arange(5)[None] < length[:, None] - 1
    return (parts | (more * 0x80).astype(np.uint8))[there].tobytes()


def numbers_of(data: bytes) -> np.ndarray:
    """What `varints` was made of."""
    if not data:
        return np.zeros(0, np.int64)
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(int)
    place = np.arange(len(raw)) - np.repeat(starts, ends - starts + 1)
    return np.add.reduceat((raw & 0x7F).astype(np.int64) << (7 * place), starts)


def bf16_patch(base: np.ndarray, new: np.ndarray) -> bytes:
    """What changed between two arrays of 16 bits."""
    places = np.flatnonzero(base != new)
    gaps = zlib.compress(varints(np.diff(places, prepend=-1) - 1), LEVEL)
    return len(gaps).to_bytes(8, "big") + gaps + zlib.compress(new[places].tobytes(), LEVEL)


def bf16_patched(base: np.ndarray, patch: bytes) -> np.ndarray:
    end = 8 + int.from_bytes(patch[:8], "big")
    places = np.cumsum(numbers_of(zlib.decompress(patch[8:end])) + 1) - 1
    new = base.copy()
    new[places] = np.frombuffer(zlib.decompress(patch[end:]), np.uint16)
    return new


def ordered(values: np.ndarray) -> np.ndarray:
    """Bits of float32 as integers in the order of the floats; undoes itself on its signed result."""
    signed = values.view(np.int32)
    return np.where(signed < 0, signed ^ np.int32(0x7FFFFFFF), signed)


def float32_patch(base: np.ndarray, new: np.ndarray) -> bytes:
    """The difference of two arrays of 32 bits."""
    d = ordered(new) - ordered(base)  # wraps around
    zigzag = ((d << 1) ^ (d >> 31)).view(np.uint32)
    return zlib.compress(np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, 4).T).tobytes(), LEVEL)


def float32_patched(base: np.ndarray, patch: bytes) -> np.ndarray:
    planes = np.frombuffer(zlib.decompress(patch), np.uint8).reshape(4, -1)
    zigzag = np.ascontiguousarray(planes.T).view(np.uint32)[:, 0]
    d = ((zigzag >> 1) ^ (-(zigzag & 1).astype(np.int32)).view(np.uint32)).view(np.int32)
    return ordered((ordered(base) + d).view(np.uint32)).view(np.uint32)


def compared(base: torch.Tensor, new: torch.Tensor) -> dict[str, float]:
    """Figures of both patches, which are checked."""
    found: dict[str, float] = {}
    for name, make, undo in (("bf16", bf16_patch, bf16_patched), ("float32", float32_patch, float32_patched)):
        old, now = bits(base, name == "bf16"), bits(new, name == "bf16")
        began = time.process_time()
        patch = make(old, now)
        found[f"{name}_ms_a_megabyte"] = 1e9 * (time.process_time() - began) / now.nbytes
        assert np.array_equal(undo(old, patch), now), f"the {name} patch is wrong"
        found[f"{name}_changed"] = float((old != now).mean())
        found[f"{name}_bytes"] = len(patch)
        found[f"{name}_whole"] = now.nbytes
    return found


def measure(rate: float, updates: list[int], seed: int, groups: int) -> list[dict[str, float]]:
    """Figures after each number of updates since the base, at one learning rate."""
    from swarm_node.config import GrpoConfig, PolicyConfig, RewardsConfig, RolloutsConfig
    from swarm_node.grpo.trainer import Trainer
    from swarm_node.policy.loading import load_policy
    from swarm_node.rollouts import collect
    from swarm_node.tasks.taskset import load_tasks
    from swarm_node.types import Sampling

    rollouts = RolloutsConfig(groups=groups, max_new_tokens=16)
    policy = load_policy(PolicyConfig(), rollouts, lambda sentence: None)
    trainer = Trainer(policy, GrpoConfig(learning_rate=rate, answers=4), Sampling(rollouts.max_new_tokens))
    tasks, rng = load_tasks(["small"], RewardsConfig()), random.Random(seed)

    def train(until: int) -> torch.Tensor:
        while policy.version < until:
            name = f"{seed}/{policy.version}/{rng.random()}"
            trainer.step(collect(policy, lambda n: tasks.sample(rng, n), tasks, rollouts, name).groups)
        return torch.cat([tensor.flatten() for tensor in policy.trainable_state().values()]).clone()

    base = train(BEFORE)
    return [{"rate": rate, "updates": n} | compared(base, train(BEFORE + n)) for n in updates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-6])
    parser.add_argument("--updates", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few groups, 1 and 2 updates; writes no figures")
    args = parser.parse_args()
    updates, groups = ([1, 2], 4) if args.quick else (sorted(args.updates), 32)
    found = [figures for rate in args.rates for figures in measure(rate, updates, args.seed, groups)]
    rows = [
        [f"{f['rate']:g}", int(f["updates"])]
        + [
            cell
            for name in ("bf16", "float32")
            for cell in (
                f"{100 * f[f'{name}_changed']:.1f} %",
                f"{100 * f[f'{name}_bytes'] / f[f'{name}_whole']:.1f} %",
                f"{f[f'{name}_ms_a_megabyte']:.0f}",
            )
        ]
        for f in found
    ]
    columns = ["learning rate", "updates since the base", "bf16 values changed", "patch / whole", "CPU ms a MB"]
    print(table([*columns, "float32 values changed", "patch / whole", "CPU ms a MB"], rows))
    if not args.quick:
        write("patches", {"seed": args.seed, "rows": found})


if __name__ == "__main__":
    main()
