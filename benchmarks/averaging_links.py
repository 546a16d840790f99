"""How long averaging of weights takes over home links, in pairs and in groups, and how much of a run that is: a model.

    python -m benchmarks.averaging_links [--seed 0]      a minute of CPU; a table for each part, a JSON file, a plot

Nothing is sent. A message takes  hop + bytes/bandwidth,  hop ~ lognormal of mean 50 ms and coefficient of variation
c (sigma^2 = log(1 + c^2)), bandwidth 100 Mbit/s up and as much down at the same time, the same for everyone. Bytes are
taken to add to the latency (for the butterfly a bound):  time = latency + (bytes of the busiest link)/bandwidth.  With
N peers, weights of S bytes, m = max over siblings or partners:

scheme      latency                                                          bytes       constant hops
tree        twice (up and down)  T(2n) = m(T(n) + hop, T'(n) + hop')         2S          2 log2 N
ring        p = 1..2(N-1):  T_i(p) = max(T_i(p-1), T_{i-1}(p-1) + hop)       2S(N-1)/N   2(N-1)
butterfly   max_ik of max_j hop(j,k) + hop(k,i): part k is averaged by k     2S(N-1)/N   2
pair        m(hop, hop') for the weights, again for word of their arrival    S           2

The tree is the latency model of NoLoCo (arXiv 2506.10911), whose "ten times" is tree : pair = log2 N = 10 at N = 1024.
Down the tree is up the tree reversed in time, so it has the same distribution. Its 2S are the best case (two trees of
chunks at a time; Sanders et al. 2009); the butterfly is hivemind's. Both have no cost per message here, which flatters
the butterfly: at N = 1024 each peer holds 1023 connections and sends 2046 messages, with no timeout.

sync        One synchronisation: seconds, and tree : pair.
sizes       Seconds that S bytes take, = inner steps of a second under which one exchange is hidden.
run         ROUNDS outer rounds of H inner steps, lognormal of mean 1 s and sigma .5. A group waits for its slowest:
            T' = max_i(T_i + work_i) + sync.  A pair that waits:  T' = max(T_i + work_i, T_j + work_j) + exchange,  so
            that delays spread from pair to pair.  Overlapped:  T' = T + max(work, exchange or sync): nobody waits
            for others, because rounds go by the clock, and who is late costs the exchange, not time; so 0 lost there
            is assumed as long as the network keeps up, not found. In fragments: S/F every H/F steps. "Lost" is
            1 - work/T, T the mean over peers; "on the network" is the part that a network without cost would save.
reference   The same without a network, T of the last peer, as a ratio group : pair. The paper's second model: 1.07,
            1.11, 1.15, 1.19 for N = 16 to 1024 come out if its .5 is the variance, not sigma.
slow        One of the peers at half speed: how much longer the others take.
consensus   Averaging alone, until the standard deviation between peers is 1 % of what it was, median of RUNS. Random
            pairs keep (N-2)/(2(N-1)) of the variance a round on average, hence "expected"; NoLoCo's momentum (alpha
            .5, gamma .7) .70 in the long run for large N; pairs along a hypercube are exact after log2 N rounds, an
            all-reduce after one. Pairs wait for their partners.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import table, write

HOP_S = 0.05
BYTES_PER_S = 100e6 / 8
NODES = (4, 16, 64, 256, 1024)
VARIATION = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
TYPICAL = 1.0
"""Coefficient of variation of hops in all parts but the first."""
INNER_STEPS = (50, 100, 500)
STEP_SIGMA = 0.5
ROUNDS = 50
FRAGMENTS = 5
RUNS = 21
BITS = {"float32": 32.0, "int8": 8.25, "4 bit": 4.25}
"""Bits of a value on the wire, scales of blocks included."""
SIZES = {
    f"{name} {codec}": n * b / 8 for name, n in (("1M", 1e6), ("100M", 1e8), ("1B", 1e9)) for codec, b in BITS.items()
}
PAYLOADS = {"latency only": 0.0, **{name: SIZES[name] for name in ("1M float32", "100M int8", "1B 4 bit")}}
PLOT = Path(__file__).parents[1] / "docs" / "images" / "averaging_links.png"

Array = NDArray[Any]
Rng = np.random.Generator
Row = dict[str, Any]


def lognormal(rng: Rng, sigma: float, *shape: int) -> Array:
    """Of mean 1."""
    if sigma == 0:
        return np.ones(shape, np.float32)
    draws = rng.standard_normal(shape, np.float32)
    draws *= sigma
    draws -= sigma**2 / 2
    return np.exp(draws, out=draws)


def hops(rng: Rng, variation: float, *shape: int) -> Array:
    """Of mean 1 and coefficient of variation `variation`."""
    return lognormal(rng, math.sqrt(math.log1p(variation**2)), *shape)


def tree(rng: Rng, n: int, variation: float, trials: int) -> Array:
    def one_way() -> Array:
        t = np.zeros((trials, n), np.float32)
        while t.shape[1] > 1:
            t = (t + hops(rng, variation, *t.shape)).reshape(trials, -1, 2).max(2)
        return t[:, 0]

    return one_way() + one_way()


def ring(rng: Rng, n: int, variation: float, trials: int) -> Array:
    t = np.zeros((trials, n), np.float32)
    for _ in range(2 * (n - 1)):
        t = np.maximum(t, np.roll(t + hops(rng, variation, trials, n), 1, axis=1))
    return t.max(1)


def butterfly(rng: Rng, n: int, variation: float, trials: int) -> Array:
    def arrivals() -> Array:
        """[from, to]; none to itself."""
        t = hops(rng, variation, n, n)
        np.fill_diagonal(t, 0)
        return t

    return np.array([(arrivals().max(0)[:, None] + arrivals()).max() for _ in range(trials)])


def pair(rng: Rng, n: int, variation: float, trials: int) -> Array:
    return hops(rng, variation, trials, 2, 2).max(2).sum(1)


def pair_mean(variation: float) -> float:
    """What `pair` is on average, in hops."""
    return 2 * (1 + math.erf(math.sqrt(math.log1p(variation**2)) / 2))


SCHEMES: dict[str, Callable[[Rng, int, float, int], Array]] = {
    "tree": tree,
    "ring": ring,
    "butterfly": butterfly,
    "pair": pair,
}
"""Latency in hops of `trials` synchronisations among n peers. Shape (trials,)."""


def copies(scheme: str, n: int) -> float:
    """Bytes up, and as many down, of the busiest peer, in S."""
    return {"tree": 2.0, "ring": 2 * (n - 1) / n, "butterfly": 2 * (n - 1) / n, "pair": 1.0}[scheme]


def seconds(scheme: str, n: int, size: float) -> float:
    """What `size` bytes of weights add to the latency."""
    return copies(scheme, n) * size / BYTES_PER_S


def trials_for(scheme: str, n: int, draws: float = 4e7) -> int:
    """Few of what takes many draws; those hardly vary."""
    return int(
        min(20_000, max(8, draws / {"tree": 4 * n, "ring": 2 * n * n, "butterfly": 2 * n * n, "pair": 4}[scheme]))
    )


def sync(rng: Rng) -> list[Row]:
    rows = []
    for n in NODES:
        for variation in VARIATION:
            hop = {name: float(of(rng, n, variation, trials_for(name, n)).mean()) for name, of in SCHEMES.items()}
            hop["pair"] = pair_mean(variation)
            rows.append(
                {
                    "nodes": n,
                    "variation": variation,
                    "tree : pair": hop["tree"] / hop["pair"],
                    "latency_s": {name: HOP_S * h for name, h in hop.items()},
                    "total_s": {
                        size: {name: HOP_S * h + seconds(name, n, PAYLOADS[size]) for name, h in hop.items()}
                        for size in PAYLOADS
                    },
                }
            )
    return rows


def inner_work(rng: Rng, n: int, steps: int, trials: int, sigma: float = STEP_SIGMA, rounds: int = ROUNDS) -> Array:
    """Seconds of `steps` inner steps: (rounds, FRAGMENTS, trials, n), each of steps / FRAGMENTS of them."""
    part = steps // FRAGMENTS
    work = np.empty((rounds, FRAGMENTS, trials, n))
    for r in range(rounds):
        work[r] = lognormal(rng, sigma, FRAGMENTS, trials, n, part).sum(-1)
    return work


def partners(rng: Rng, shape: tuple[int, ...]) -> Array:
    """Who meets whom, of `shape` (trials, n): in each row an involution without fixed points."""
    trials, n = shape
    order = np.argsort(rng.random((trials, n)), axis=1)
    partner = np.empty_like(order)
    np.put_along_axis(partner, order, order.reshape(trials, -1, 2)[:, :, ::-1].reshape(trials, n), axis=1)
    return partner


def exchanges(rng: Rng, partner: Array, variation: float, size: float) -> Array:
    """Seconds of each peer's exchange, as its partner's: (trials, n)."""
    took = HOP_S * hops(rng, variation, *partner.shape, 2)
    other = np.take_along_axis(took, partner[:, :, None], axis=1)
    return np.asarray(np.maximum(took, other).sum(-1) + size / BYTES_PER_S)


def group_run(work: Array, syncs: Array) -> Array:
    """When peers have done all `work` (rounds, parts, trials, n) and `syncs` (rounds, trials), in seconds."""
    total = work.sum(1).max(2).sum(0) + syncs.sum(0)
    return np.broadcast_to(total[:, None], work.shape[2:])


def waiting_run(rng: Rng, work: Array, exchange: Callable[[Array], Array], fragments: int = 1) -> Array:
    """As `group_run`, of pairs that wait for each other. Shape (trials, n)."""
    clock = np.zeros(work.shape[2:])
    for stretch in _stretches(work, fragments):
        clock = clock + stretch
        partner = partners(rng, clock.shape)
        clock = np.maximum(clock, np.take_along_axis(clock, partner, axis=1)) + exchange(partner)
    return clock


def overlapped_run(work: Array, took: Iterable[Array], fragments: int = 1) -> Array:
    """As `waiting_run`, if what each round `took` on the network goes on during the next inner steps; the last round
    is not waited for."""
    clock, *stretches = _stretches(work, fragments)
    for stretch, seconds_taken in zip(stretches, took, strict=False):
        clock = clock + np.maximum(stretch, seconds_taken)
    return clock


def in_pairs(rng: Rng, shape: tuple[int, ...], size: float) -> Iterator[Array]:
    """Seconds of each peer's exchange, round after round: (trials, n) each."""
    while True:
        yield exchanges(rng, partners(rng, shape), TYPICAL, size)


def _stretches(work: Array, fragments: int) -> list[Array]:
    """Inner steps between two exchanges, as (trials, n)."""
    rounds, parts, *rest = work.shape
    return list(work.reshape(rounds * fragments, parts // fragments, *rest).sum(1))


def runs(rng: Rng) -> list[Row]:
    rows = []
    for n in NODES:
        trials = max(1, 1024 // n)
        pools = {name: HOP_S * of(rng, n, TYPICAL, trials_for(name, n, 8e6)) for name, of in SCHEMES.items()}
        for steps in INNER_STEPS:
            work = inner_work(rng, n, steps, trials)
            alone = work.sum((0, 1)).mean()
            seed = int(rng.integers(2**32))
            without = one_run(seed, work, 0.0, pools, network=False)
            for payload, size in PAYLOADS.items():
                took = one_run(seed, work, size, pools)
                rows.append(
                    {
                        "nodes": n,
                        "inner_steps": steps,
                        "payload": payload,
                        "lost": {name: 1 - alone / t for name, t in took.items()},
                        "on_network": {name: (t - without[name]) / t for name, t in took.items()},
                        "tree : pair": took["tree"] / took["pair, waits"],
                    }
                )
    return rows


def one_run(seed: int, work: Array, size: float, pools: dict[str, Array], network: bool = True) -> dict[str, float]:
    """Seconds of a run, mean over peers. Without `network`, only waiting for each other is left."""
    rounds, _, trials, n = work.shape
    took: dict[str, Array] = {}
    for scheme in ("tree", "ring", "butterfly"):
        rng = np.random.default_rng(seed)
        syncs = network * (rng.choice(pools[scheme], (rounds, trials)) + seconds(scheme, n, size))
        took[scheme] = group_run(work, syncs)
        took[f"{scheme}, overlapped"] = overlapped_run(work, syncs[:, :, None])
    for fragments, name in ((1, "pair"), (FRAGMENTS, f"pair in {FRAGMENTS}")):
        part = size / fragments
        rng = np.random.default_rng(seed)

        def exchange(partner: Array, rng: Rng = rng, part: float = part) -> Array:
            return network * exchanges(rng, partner, TYPICAL, part)

        took[f"{name}, waits"] = waiting_run(rng, work, exchange, fragments)
        pairs = (network * t for t in in_pairs(rng, (trials, n), part))
        took[f"{name}, overlapped"] = overlapped_run(work, pairs, fragments)
    return {name: float(clock.mean()) for name, clock in took.items()}


def no_network(partner: Array) -> Array:
    return np.zeros(partner.shape)


def barrier_ratio(rng: Rng, n: int, sigma: float, steps: int = 100, trials: int | None = None) -> float:
    """A run whose group waits for all, to one in pairs that wait for each other, until the last is done."""
    work = inner_work(rng, n, steps, trials or max(2, 4096 // n), sigma)
    group = group_run(work, np.zeros(work.shape[0:3:2])).mean()
    return float(group / waiting_run(rng, work, no_network).max(1).mean())


def reference(rng: Rng) -> list[Row]:
    return [
        {"nodes": n, "sigma² = .5": barrier_ratio(rng, n, math.sqrt(0.5)), "sigma = .5": barrier_ratio(rng, n, 0.5)}
        for n in NODES
    ]


def slow(rng: Rng, n: int = 64, steps: int = 100) -> list[Row]:
    rows = []
    for rounds in (10, 50, 200):
        work = inner_work(rng, n, steps, 4, rounds=rounds)
        work[..., 0] *= 2
        others = work[..., 1:].sum((0, 1)).mean()

        def exchange(partner: Array) -> Array:
            return exchanges(rng, partner, TYPICAL, 0.0)

        syncs = HOP_S * tree(rng, n, TYPICAL, rounds * 4).reshape(rounds, 4)
        ways = {
            "tree": group_run(work, syncs),
            "pair, waits": waiting_run(rng, work, exchange),
            "pair, overlapped": overlapped_run(work, in_pairs(rng, work.shape[2:], 0.0)),
        }
        rows.append({"nodes": n, "rounds": rounds} | {k: float(t[:, 1:].mean() / others) for k, t in ways.items()})
    return rows


def spread(rng: Rng, n: int, rounds: int, alpha: float = 0.0, gamma: float = 1.0, width: int = 200) -> Array:
    """Variance between n peers after 0..rounds exchanges in random pairs, of 1 at first, nothing learned:
    m <- alpha m + gamma (pair's mean - x), x <- x + m. Mean over `width` values."""
    x = rng.standard_normal((n, width))
    m = np.zeros_like(x)
    found = []
    for _ in range(rounds + 1):
        found.append(x.var(axis=0).mean())
        m = alpha * m + gamma * (x[partners(rng, (1, n))[0]] - x) / 2
        x = x + m
    return np.array(found) / found[0]


def rounds_to(rng: Rng, n: int, variance: float, alpha: float = 0.0, gamma: float = 1.0) -> int:
    """Rounds in random pairs until `variance` is left, median of RUNS."""
    left = (spread(rng, n, 80, alpha, gamma) for _ in range(RUNS))
    return int(np.median([np.argmax(variances <= variance) for variances in left]))


def consensus(rng: Rng, target: float = 0.01) -> list[Row]:
    rows = []
    for n in NODES:
        trials = max(1, 4096 // n)
        rounds = {
            "pairs": rounds_to(rng, n, target**2),
            "noloco": rounds_to(rng, n, target**2, 0.5, 0.7),
            "hypercube": int(math.log2(n)),
        }
        expected = math.ceil(math.log(target**2) / math.log((n - 2) / (2 * (n - 1))))
        row: Row = {"nodes": n, "rounds": rounds, "expected": expected}
        for payload in ("latency only", "100M int8"):
            size = PAYLOADS[payload]

            def exchange(partner: Array, size: float = size) -> Array:
                return exchanges(rng, partner, TYPICAL, size)

            row[payload] = {
                name: float(waiting_run(rng, np.zeros((k, 1, trials, n)), exchange).max(1).mean())
                for name, k in rounds.items()
            } | {
                name: HOP_S * float(SCHEMES[name](rng, n, TYPICAL, trials_for(name, n, 8e6)).mean())
                + seconds(name, n, size)
                for name in ("tree", "ring", "butterfly")
            }
        rows.append(row)
    return rows


def show(figures: dict[str, list[Row]]) -> str:
    text = []

    def add(title: str, columns: list[str], rows: list[list[Any]]) -> None:
        text.append(f"\n**{title}**\n\n{table(columns, rows)}")

    by = {(row["nodes"], row["variation"]): row for row in figures["sync"]}
    add(
        "tree : pair, latency only, by coefficient of variation of hops",
        ["N", *(f"{v:g}" for v in VARIATION)],
        [[n, *(f"{by[n, v]['tree : pair']:.1f}" for v in VARIATION)] for n in NODES],
    )
    add(
        "seconds of one synchronisation, variation 0 / 1 / 2.5",
        ["N", *SCHEMES],
        [
            [n, *(" / ".join(f"{by[n, v]['latency_s'][s]:.3g}" for v in (0.0, 1.0, 2.5)) for s in SCHEMES)]
            for n in NODES
        ],
    )
    add(
        f"the same with bytes, N = 1024, variation {TYPICAL:g}",
        ["weights", *SCHEMES, "tree : pair"],
        [
            [size, *(f"{t[s]:.3g}" for s in SCHEMES), f"{t['tree'] / t['pair']:.1f}"]
            for size, t in by[1024, TYPICAL]["total_s"].items()
        ],
    )
    add(
        "seconds for S bytes at 100 Mbit/s = inner steps of a second under which a pair's exchange is hidden",
        ["parameters", *BITS],
        [[n, *(f"{SIZES[f'{n} {c}'] / BYTES_PER_S:.3g}" for c in BITS)] for n in ("1M", "100M", "1B")],
    )
    ways = [
        "tree",
        "tree, overlapped",
        "ring",
        "butterfly",
        "pair, waits",
        f"pair in {FRAGMENTS}, waits",
        "pair, overlapped",
    ]
    for title, chosen in (
        ("N = 1024", [r for r in figures["run"] if r["nodes"] == 1024]),
        (
            "H = 100",
            [r for r in figures["run"] if r["inner_steps"] == 100 and r["payload"] in ("latency only", "100M int8")],
        ),
    ):
        add(
            f"share of a run lost (on the network), {title}",
            ["N", "H", "weights", *ways, "tree : pair, waits"],
            [
                [
                    *(r[k] for k in ("nodes", "inner_steps", "payload")),
                    *(f"{100 * r['lost'][w]:.1f} ({100 * r['on_network'][w]:.1f})" for w in ways),
                    f"{r['tree : pair']:.2f}",
                ]
                for r in chosen
            ],
        )
    for part, title in (
        ("reference", "group : pair, total time, no network, H = 100, until the last is done"),
        ("slow", "one peer at half speed: the others' time / their own work"),
    ):
        names = list(figures[part][0])
        cells = [[f"{v:.2f}" if isinstance(v, float) else v for v in row.values()] for row in figures[part]]
        add(title, names, cells)
    schemes = list(figures["consensus"][0]["latency only"])
    add(
        "spread down to 1 %: rounds; seconds, latency only / 100M int8",
        ["N", "expected", *(f"{w}, rounds" for w in figures["consensus"][0]["rounds"]), *(f"{w}, s" for w in schemes)],
        [
            [
                r["nodes"],
                r["expected"],
                *r["rounds"].values(),
                *(f"{r['latency only'][w]:.3g} / {r['100M int8'][w]:.3g}" for w in schemes),
            ]
            for r in figures["consensus"]
        ],
    )
    return "\n".join(text)


def plot(figures: dict[str, list[Row]], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=100, layout="constrained")
    (ratio, size), (lost, agree) = figure.subplots(2, 2)
    colours = {"tree": "tab:red", "ring": "tab:brown", "butterfly": "tab:orange", "pair": "tab:blue"}

    for i, variation in enumerate(VARIATION):
        ys = [row["tree : pair"] for row in figures["sync"] if row["variation"] == variation]
        ratio.plot(NODES, ys, "o-", ms=4, color=str(round(0.7 - 0.14 * i, 2)), label=f"{variation:g}")
        ratio.annotate(f"{variation:g}", (NODES[-1], ys[-1]), xytext=(6, -3), textcoords="offset points", fontsize=8)
    ratio.set(xscale="log", yscale="log", xlabel="peers", ylabel="tree all-reduce : pair", xlim=(3.4, 1700))
    ratio.set_title("Latency of one synchronisation, by variation of hops", fontsize=10)
    ratio.set_xticks(NODES, [str(n) for n in NODES])
    ratio.set_yticks([2, 4, 10, 20, 40], ["2", "4", "10", "20", "40"])
    ratio.minorticks_off()

    bytes_ = np.logspace(4, 9.7, 60)
    at = next(row for row in figures["sync"] if (row["nodes"], row["variation"]) == (1024, TYPICAL))
    for scheme, colour in colours.items():
        ys = [at["latency_s"][scheme] + seconds(scheme, 1024, b) for b in bytes_]
        size.plot(bytes_ / 1e6, ys, color=colour, lw=2, label=scheme)
    size.set(xscale="log", yscale="log", xlabel="MB of weights", ylabel="seconds")
    size.set_title(f"One synchronisation, 1024 peers, variation {TYPICAL:g}", fontsize=10)
    size.legend(frameon=False, fontsize=9)

    ways = {
        "tree": "tab:red",
        "tree, overlapped": "tab:orange",
        "pair, waits": "tab:blue",
        "pair, overlapped": "tab:green",
    }
    groups = [(h, payload) for payload in list(PAYLOADS)[1:] for h in INNER_STEPS]
    by = {(r["inner_steps"], r["payload"]): r for r in figures["run"] if r["nodes"] == 1024}
    for k, (way, colour) in enumerate(ways.items()):
        xs = np.arange(len(groups)) + 0.2 * k
        total = np.array([100 * by[g]["lost"][way] for g in groups])
        network = np.array([100 * by[g]["on_network"][way] for g in groups])
        lost.bar(xs, network, 0.2, color=colour, label=way)
        lost.bar(xs, total - network, 0.2, bottom=network, color=colour, alpha=0.35)
        for x in xs[total < 0.05]:
            lost.text(x, 0.3, "0", ha="center", fontsize=8, color=colour)
    lost.set_xticks(np.arange(len(groups)) + 0.3, [f"{h}\n{p}" if h == 100 else f"{h}" for h, p in groups])
    lost.set(ylabel="% of the run lost", xlabel="inner steps of 1 s between synchronisations; weights")
    lost.set_title("Whole run, 1024 peers (pale: waiting for slower peers)", fontsize=10)
    lost.legend(frameon=False, fontsize=9)

    row = figures["consensus"][-1]
    took = row["100M int8"]
    rng = np.random.default_rng(0)
    for name, rounds, colour, alpha, gamma in (
        ("pairs", row["rounds"]["pairs"], "tab:blue", 0.0, 1.0),
        ("noloco", row["rounds"]["noloco"], "tab:green", 0.5, 0.7),
    ):
        left = 100 * np.sqrt(spread(rng, row["nodes"], rounds, alpha, gamma))
        label = "random pairs" if name == "pairs" else "NoLoCo, α = .5, γ = .7"
        agree.plot(np.linspace(0, took[name], rounds + 1), left, "o-", ms=3, color=colour, label=label)
    for name, colour in (("tree", "tab:red"), ("butterfly", "tab:orange"), ("ring", "tab:brown")):
        agree.axvline(took[name], color=colour, ls="--", label=f"{name}: exact")
    agree.set(yscale="log", xlabel="seconds", ylabel="% of the spread left", ylim=(0.7, 130))
    agree.set_yticks([1, 10, 100], ["1", "10", "100"])
    agree.set_title("Averaging alone, 1024 peers, 100M parameters in int8", fontsize=10)
    agree.legend(fontsize=9, framealpha=1, edgecolor="white")

    for axes in (ratio, size, lost, agree):
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parts = {"sync": sync, "run": runs, "reference": reference, "slow": slow, "consensus": consensus}
    figures = {name: part(np.random.default_rng([args.seed, i])) for i, (name, part) in enumerate(parts.items())}
    print(show(figures))
    sizes = [{"weights": name, "bytes": size, "seconds": size / BYTES_PER_S} for name, size in SIZES.items()]
    write("averaging_links", {"seed": args.seed, "hop_s": HOP_S, "bytes_per_s": BYTES_PER_S, "sizes": sizes, **figures})
    plot(figures, PLOT)


if __name__ == "__main__":
    main()
