"""Seconds that vLLM takes for a batch: run by `benchmarks.real_sampling` with an interpreter that has vLLM.

Reads {"model", "dtype", "prompts", "new", "repeats"} from standard input and prints {"seconds": [...]} as the last
line. It imports nothing of this package, which that interpreter does not have.
"""

from __future__ import annotations

import json
import resource
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    spec = json.load(sys.stdin)
    engine = LLM(model=spec["model"], dtype=spec["dtype"], max_model_len=1024, enforce_eager=False)
    sampling = SamplingParams(temperature=1.0, max_tokens=spec["new"], min_tokens=spec["new"], ignore_eos=True)
    times = []
    for _ in range(spec["repeats"] + 1):
        start = time.perf_counter()
        made = engine.generate(spec["prompts"], sampling, use_tqdm=False)
        times.append(time.perf_counter() - start)
    assert all(len(each.outputs[0].token_ids) == spec["new"] for each in made)
    kin = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    peak = max(resource.getrusage(who).ru_maxrss for who in kin) / 1024
    print("\n" + json.dumps({"seconds": times[1:], "peak_mib": peak}), flush=True)


if __name__ == "__main__":
    main()
