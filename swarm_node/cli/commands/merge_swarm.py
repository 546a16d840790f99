"""Merge the current weights of the members of a swarm into one model: `swarm-node merge SWARM`.

    visitor -> cards -> a cohort -> its weights, as they arrive -> mapped files -> `merge.merge`

The visitor is no member and trains nothing. Members send it a copy between two steps, as to a late joiner. It needs the
model that the cohort started from. The cohort's id is derived from that model, which proves that it is the same.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from swarm_node.averaging.cohort import cohorts_of
from swarm_node.averaging.cohort_weights import MAX_VERSION, collect_weights
from swarm_node.averaging.fragments import Fragments
from swarm_node.averaging.merge import State, task_norms
from swarm_node.cli.commands.evaluate import fit_into_memory
from swarm_node.cli.commands.merge import Cohort, MergeRequest, merge_and_show
from swarm_node.cli.options import note
from swarm_node.config import NodeConfig, TaskConfig
from swarm_node.errors import UserError
from swarm_node.observability.refusals import SHORT_ID
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.say import Say
from swarm_node.storage.model_names import model_name
from swarm_node.storage.rundir import RunDir, check_new_directory, os_errors_explained
from swarm_node.swarm.links import Swarm, find_swarm
from swarm_node.swarm.lookup import REPORT_EVERY_S, fetch_manifest, look_around
from swarm_node.swarm.manifests import task_tables
from swarm_node.swarm.network import visitor
from swarm_node.swarm.question_files import gather_files
from swarm_node.tasks.one_turn import in_form
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.manifest import Manifest
from swarm_protocol.messages import PeerCard
from swarm_protocol.transports.base import Transport

QUIET_S = 60.0  # the search ends after this many seconds without a new member, even if too few were found
MANIFEST_S = 20.0  # longest wait for a member that sends the manifest, in seconds
MAX_SOURCES = 64
"""Most members whose weights are fetched, chosen at random. Each needs its size on disk, and cards are easily faked."""
Members = Mapping[str, PeerCard]  # peer id -> card
ASTRAY = 10.0  # members are left out whose weights are this many times further from the start than the median member's


def main(named: str, config: NodeConfig, request: MergeRequest) -> None:
    """Merge members of the swarm that is `named`."""
    say, out, wanted, timeout_s = note, request.out, request.cohort, request.timeout_s
    swarm = find_swarm(named)
    check_new_directory(out)
    with ExitStack() as stack:
        with os_errors_explained(out):
            files = tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent)
            folder = Path(stack.enter_context(files))
        with visitor(swarm, config.network, say) as transport:
            found = look_for_cohorts(transport, swarm.id, wanted, timeout_s, say)
            manifest = swarm.manifest if request.questions == 0 else _manifest(swarm, transport, say)
            if manifest is not None:
                config = in_form(config, manifest.answer)
            fit = partial(fit_into_memory, config=config, rollouts=config.rollouts, samples=config.eval.samples)
            policy = load_policy(config.policy, config.rollouts, say, fit=fit)
            cohort, fragments = choose(found, policy, swarm.id, wanted, say)
            chosen = sources(found[cohort], request.without, say)
            measured = manifest if request.questions else None
            tasks = [] if measured is None else _tasks(measured, swarm, config, transport, folder, say)
            weights, versions = gather(transport, (swarm.id, cohort), chosen, fragments, policy, folder, timeout_s, say)
        merge_and_show(Cohort(policy, config, tasks, weights, versions=versions), request, say)


def cohorts(members: Members) -> dict[str, dict[str, PeerCard]]:
    """Cohort id -> members, the largest cohort first."""
    found: dict[str, dict[str, PeerCard]] = {}
    for peer, card in sorted(members.items()):
        if card.cohort:
            found.setdefault(card.cohort, {})[peer] = card
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def look_for_cohorts(
    transport: Transport,
    swarm: str,
    wanted: str | None,
    timeout_s: float,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
    tick_s: float = 0.2,
) -> dict[str, dict[str, PeerCard]]:
    """The cohorts of the swarm, once the `wanted` one (or any) has two members and no more members appear. With fewer
    members the search ends after `QUIET_S` without a new one, or after `timeout_s`. Raises UserError if there is no
    cohort then."""
    began = changed = said = clock()
    seen: Members = {}
    while True:
        members = look_around(transport, min(REPORT_EVERY_S, began + timeout_s - clock()), clock, tick_s) or seen
        found = cohorts(members)
        if max((len(found[cohort]) for cohort in found if wanted in (None, cohort)), default=0) >= 2:
            return found
        now = clock()
        if members.keys() != seen.keys():
            seen, changed = members, now
        if now - began >= timeout_s or (seen and now - changed > QUIET_S):
            break
        if now - said >= REPORT_EVERY_S:
            said = now
            say(f"{_who_is_there(swarm, seen, found)}: still looking")
    if not found:
        raise UserError(f"{_who_is_there(swarm, seen, found)}: `swarm-node status` and `swarm-node doctor` say more")
    return found


def _who_is_there(swarm: str, members: Members, found: Mapping[str, Members]) -> str:
    if not members:
        return f"no member of swarm {swarm[:16]} has answered"
    averaging = sum(map(len, found.values()))
    return f"{len(members)} members of swarm {swarm[:16]}, of whom {averaging or 'none'} average weights"


def choose(
    found: Mapping[str, Members], policy: Policy, swarm: str, wanted: str | None, say: Say
) -> tuple[str, Fragments]:
    """The cohort `wanted`, or else the largest that trains this `policy`, and its fragments. Raises UserError."""
    if wanted is not None and wanted not in found:
        listed = ", ".join(f"{cohort} ({len(members)} members)" for cohort, members in found.items())
        raise UserError(f"there is no cohort {wanted} in this swarm, but {listed}")
    known = cohorts_of(policy.trainable_state(), policy.start, swarm)
    fitting = [cohort for cohort in found if cohort in known and wanted in (None, cohort)]
    if not fitting:
        cohort = wanted or next(iter(found))
        model, why = model_name(policy.config.model), _why(found[cohort], policy)
        raise UserError(f"cohort {cohort} did not begin with {model}: {why}")
    cohort = fitting[0]
    fragments, method = known[cohort]
    say(f"cohort {cohort}, {len(found[cohort])} members, {method}")
    others = [
        f"{other} ({len(members)} members, {'also' if other in known else 'not'} of this model)"
        for other, members in found.items()
        if other != cohort
    ]
    if others:
        say(f"there are others, which --cohort chooses: {', '.join(others)}")
    return cohort, fragments


def _why(members: Members, policy: Policy) -> str:
    """Why the cohort of `members` may not have started from `policy`, by their cards."""
    families = {card.family for card in members.values()}
    if policy.family not in families:
        return f"its members train a {' or '.join(sorted(families))}, this is a {policy.family}; give theirs as --model"
    if policy.tokenizer_hash not in {card.tokenizer for card in members.values()}:
        return "its members have another tokenizer; give their model as --model"
    return (
        "other weights, or other LoRA settings (policy.lora, lora_rank, lora_alpha, lora_targets); give the config.toml"
        " of a member's run as --config"
    )


def sources(members: Members, without: Sequence[str], say: Say) -> dict[str, PeerCard]:
    """Members to ask. Raises UserError if an entry of `without`, a name or the end of a peer id, matches none."""
    for text in without:
        if not any(_is(text, peer, card) for peer, card in members.items()):
            raise UserError(f"nobody in this cohort is called {text}, nor is it the end of a peer id")
    left = {peer: card for peer, card in members.items() if not any(_is(text, peer, card) for text in without)}
    if len(left) > MAX_SOURCES:
        say(f"{MAX_SOURCES} of {len(left)} members, chosen at random")
        left = {peer: left[peer] for peer in random.sample(list(left), MAX_SOURCES)}
    return left


def _is(text: str, peer: str, card: PeerCard) -> bool:
    return text == card.name or (len(text) >= SHORT_ID and peer.endswith(text))


def called(peer: str, card: PeerCard) -> str:
    """Name of a member in tables and sentences."""
    return f"{card.name} …{peer[-SHORT_ID:]}"


def gather(
    transport: Transport,
    place: tuple[str, str],
    members: Members,
    fragments: Fragments,
    policy: Policy,
    folder: Path,
    timeout_s: float,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[dict[str, State], dict[str, int]]:
    """Weights (mapped files in `folder`) and versions by source. `place`: (swarm, cohort). Raises UserError."""
    start = policy.trainable_state()
    weights: dict[str, State] = {}
    versions: dict[str, int] = {}

    def keep(peer: str, version: int, values: list[Tensor]) -> None:
        name = called(peer, members[peer])
        with os_errors_explained(folder):
            weights[name] = mapped(folder / f"{peer}.f32", values, fragments, start)
        versions[name] = version
        say(f"weights of {name}, version {version}")

    say(f"asking {len(members)} members for {sum(fragments.sizes) * 4 / 1e6:.1f} MB each")
    claims = {peer: min(card.policy_version, MAX_VERSION) for peer, card in members.items()}
    failed = collect_weights(transport, place, claims, fragments.sizes, keep, timeout_s, clock, sleep)
    for peer, why in failed.items():
        say(f"left out: {called(peer, members[peer])} ({why})")
    for name, why in astray(weights, start).items():
        del weights[name], versions[name]
        say(f"left out: {name} ({why})")
    if len(weights) < 2:
        raise UserError(
            f"a merge takes the weights of two members at least; {len(weights)} of {len(members)} gave them"
        )
    return weights, versions


def mapped(path: Path, values: Sequence[Tensor], fragments: Fragments, like: State) -> State:
    """Write weights to a new file and map it as float32 tensors, so that only used parts are in memory."""
    with path.open("wb") as file:
        for fragment in values:
            file.write(memoryview(fragment.numpy()).cast("B"))
    flat = torch.from_file(str(path), shared=False, size=sum(fragments.sizes), dtype=torch.float32)
    names = [name for i in range(len(fragments.sizes)) for name in fragments.names[i]]
    parts = flat.split([like[name].numel() for name in names])
    found = {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}
    return {name: found[name] for name in like}


def astray(weights: Mapping[str, State], start: State) -> dict[str, str]:
    """Source -> why its weights are implausibly far from the start. Empty for two sources: either could be wrong."""
    if len(weights) < 3:
        return {}
    norms = task_norms(weights, start)
    middle = median(norms.values())
    far = {name: norm for name, norm in norms.items() if norm > ASTRAY * middle > 0}
    return {name: f"{norm:.3g} from the start, where {middle:.3g} is usual" for name, norm in far.items()}


def _manifest(swarm: Swarm, transport: Transport, say: Say) -> Manifest:
    try:
        return fetch_manifest(transport, swarm, say, MANIFEST_S)
    except PeerUnreachable as error:
        raise UserError(f"{error}: name the manifest file, or skip measuring (--questions 0)") from error


def _tasks(
    manifest: Manifest, swarm: Swarm, config: NodeConfig, transport: Transport, folder: Path, say: Say
) -> list[str | TaskConfig]:
    chosen = config.tasks if "tasks" in config.model_fields_set else []
    tables = task_tables(manifest, gather_files(manifest, swarm, RunDir(folder), chosen, say, transport))
    if not tables:
        raise UserError(f"no question file of {manifest.name} was found: --questions 0 merges without measuring")
    return list(tables)
