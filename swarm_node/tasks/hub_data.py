"""Question files from a data set of the Hugging Face hub.

    hf:OWNER/NAME[/CONFIGURATION | /FILE][:SPLIT][@REVISION] -> a commit and its files -> the hub's cache

The hub keeps a copy of most data sets as Parquet, at CONFIGURATION/SPLIT/0000.parquet on the branch
`refs/convert/parquet`. That is read where it is there, else plain files of the data set. No script of a data set is
ever run.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from swarm_node.config import TaskConfig
from swarm_node.config.training import HUB, QUESTION_FILES
from swarm_node.errors import TemporaryError, UserError
from swarm_node.say import in_short
from swarm_node.storage.hub import hub_answers

CONVERTED = "refs/convert/parquet"
MAX_HUB_BYTES = 2**30  # of the files of one split: they are read into memory
TRAIN = "train"  # the split that is read unless another one is named
MOST_LISTED = 12  # names in a message
PARTIAL = "partial-"  # before a split of which the hub has converted the beginning only
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([^:@]+))?(?::([\w.-]+))?(?:@([\w./-]+))?", re.ASCII)
_PARQUET = re.compile(r"([^/]+)/([^/]+)/\d+\.parquet")
_SHARD = re.compile(r"[-_]?\d{2,}(-of-\d+)?")


class HubName(NamedTuple):
    """The parts of a name; "" where it has none."""

    repo: str
    part: str  # configuration, or file
    split: str
    revision: str

    def __str__(self) -> str:
        part, split = self.part and f"/{self.part}", self.split and f":{self.split}"
        return f"{HUB}{self.repo}{part}{split}{self.revision and f'@{self.revision}'}"


class HubFiles(NamedTuple):
    """Files of a data set on this machine."""

    name: HubName  # with the commit
    paths: list[Path]


def parse(name: str) -> HubName:
    """The parts of `hf:…`; `hf://datasets/…` is the same. UserError if it is no such name."""
    rest = name.removeprefix(HUB).removeprefix("//").removeprefix("datasets/")
    if (match := _NAME.fullmatch(rest)) is None:
        raise UserError(f"{name!r} is no data set of the hub: write {HUB}OWNER/NAME, or {HUB}OWNER/NAME/main:train")
    return HubName(*(part or "" for part in match.groups()))


def label_of(name: str) -> str:
    """A short name for the questions of `hf:…`."""
    found = parse(name)
    return re.sub(r"[^\w.-]+", "-", "-".join(filter(None, [found.repo.split("/")[1], found.part, found.split])))


def files_of(name: str) -> HubFiles:
    """The files of `hf:…`, downloaded unless the hub's cache has them. UserError says what the data set has if the
    name is not exact, and what to do where the hub cannot be asked."""
    wanted = parse(name)
    if re.fullmatch("[0-9a-f]{40}", wanted.revision) and (there := _cached(wanted)):
        return there
    _check_reach(wanted)
    commit, sizes = _listed(wanted)
    chosen = chosen_files(wanted, list(sizes))
    if (total := sum(sizes[each] for each in chosen)) > MAX_HUB_BYTES:
        raise UserError(
            f"{wanted} has {total / 2**30:.1f} GiB, and questions are read into memory, at most "
            f"{MAX_HUB_BYTES >> 30} GiB: download it, and write the rows that you need to a file"
        )
    return _downloaded(wanted._replace(revision=commit), chosen)


def pinned(specs: Sequence[str | TaskConfig]) -> list[str | TaskConfig]:
    """`specs`, in which each name of the hub has its commit, so that a run goes on with the same questions."""
    found: list[str | TaskConfig] = []
    for spec in specs:
        file = spec if isinstance(spec, str) else spec.file
        if file is None or not file.startswith(HUB):
            found.append(spec)
            continue
        exact = str(files_of(file).name)
        found.append(exact if isinstance(spec, str) else spec.model_copy(update={"file": exact}))
    return found


def chosen_files(wanted: HubName, names: Sequence[str]) -> list[str]:
    """Those of a data set's files that a name means. UserError lists what there is."""
    converted = [(match[1], match[2], name) for name in names if (match := _PARQUET.fullmatch(name))]
    if wanted.part in names:
        return [wanted.part]
    if converted:
        config = _one(wanted, "configuration", wanted.part, [config for config, _, _ in converted], "default")
        splits = [(split.removeprefix(PARTIAL), name) for each, split, name in converted if each == config]
        split = _one(wanted, "split", wanted.split, [split for split, _ in splits], TRAIN)
        return sorted(name for each, name in splits if each == split)
    return _plain(wanted, names)


def _plain(wanted: HubName, names: Sequence[str]) -> list[str]:
    """The question files that have configuration and split in their paths."""
    usable = [name for name in names if name.lower().endswith(QUESTION_FILES) and not name.startswith(".")]
    usable = [name for name in usable if name != "dataset_infos.json"]
    of_part = [name for name in usable if not wanted.part or wanted.part in name]
    split = wanted.split or TRAIN
    found = [name for name in of_part if split in re.split(r"[/._-]", name)]
    if not found and not wanted.split:
        found = of_part
    if len({_SHARD.sub("", name) for name in found}) != 1:
        have = _some(usable) or "no file of questions that can be read without running its own code"
        how = f": name one, as {HUB}{wanted.repo}/{usable[0]}" if usable else ""
        raise UserError(f"{wanted} is not one file: the data set has {have}{how}")
    return sorted(found)


def _one(wanted: HubName, what: str, named: str, names: Iterable[str], usual: str) -> str:
    """The name that is meant: the one that was given, else the usual one, else the only one."""
    have = list(dict.fromkeys(names))
    if named in have:
        return named
    if not named and (usual in have or len(have) == 1):
        return usual if usual in have else have[0]
    example = f"{HUB}{wanted.repo}/{have[0]}" if what != "split" else f"{wanted._replace(split=have[0])}"
    raise UserError(
        f"{wanted}: the data set has {'no' if named else 'several'} {what}{f' {named!r}' if named else 's'}; it has "
        f"{_some(have)}: name one, as {example}"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _check_reach(wanted: HubName) -> None:
    """Raise TemporaryError unless the hub answers: its library tries again for more than a minute."""
    from huggingface_hub import is_offline_mode

    why = "HF_HUB_OFFLINE is set" if is_offline_mode() else "" if hub_answers() else "it does not answer"
    if why:
        raise TemporaryError(
            f"cannot read {wanted}: the hub cannot be reached ({why}). On a machine that reaches it, `pip install "
            f'datasets` and load_dataset("{wanted.repo}", split="{wanted.split or TRAIN}").to_json("questions.jsonl") '
            "write a file that can be read here; what was read before is read again by its commit, "
            f"{wanted._replace(revision='COMMIT')}"
        )


def _listed(wanted: HubName) -> tuple[str, Mapping[str, int]]:
    """(commit, file -> bytes) of a data set: the hub's Parquet copy, else the data set itself. Raises UserError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    revisions = [wanted.revision] if wanted.revision else [CONVERTED, None]
    for revision in revisions:
        try:
            info = HfApi().dataset_info(wanted.repo, revision=revision, files_metadata=True, timeout=60)
        except RevisionNotFoundError:
            continue
        except GatedRepoError as error:
            raise UserError(
                f"{wanted}: its owner asks for an agreement: accept it on the data set's page, then `hf auth login`"
            ) from error
        except RepositoryNotFoundError as error:
            raise UserError(
                f"{wanted}: the hub has no data set {wanted.repo}, or it is private (`hf auth login`)"
            ) from error
        except (HfHubHTTPError, OSError) as error:
            raise TemporaryError(f"cannot read {wanted}: {in_short(error)}") from error
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
        if revision != CONVERTED or any(map(_PARQUET.fullmatch, sizes)):
            return str(info.sha), sizes
    raise UserError(f"{wanted}: the data set has no revision {wanted.revision}")


def _downloaded(name: HubName, files: Sequence[str]) -> HubFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [glob.escape(each) for each in files]
    try:
        folder = snapshot_download(name.repo, repo_type="dataset", revision=name.revision, allow_patterns=patterns)
    except (HfHubHTTPError, OSError) as error:
        raise TemporaryError(f"cannot download {name}: {in_short(error)}") from error
    return HubFiles(name, [Path(folder) / each for each in files])


def _cached(wanted: HubName) -> HubFiles | None:
    """The files of a commit, if the hub's cache has all of them, and the list of the data set's files that tells so."""
    from huggingface_hub import get_cached_repo_tree, try_to_load_from_cache
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    where = {"repo_type": "dataset", "revision": wanted.revision}
    try:
        chosen = chosen_files(wanted, [each.path for each in get_cached_repo_tree(wanted.repo, **where)])
    except (UserError, CachedRepoTreeNotFoundError):
        return None
    paths = [try_to_load_from_cache(wanted.repo, each, **where) for each in chosen]
    there = [Path(path) for path in paths if isinstance(path, str)]
    return HubFiles(wanted, there) if len(there) == len(chosen) else None
