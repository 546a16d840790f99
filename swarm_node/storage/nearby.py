"""Names near one that does not exist: the runs and manifests beside it, for an error that helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

MOST_NAMED = 5  # names in a message


def names_near(path: Path, runs: bool = True, manifests: bool = False) -> str:
    """The end of a sentence about a `path` that does not exist: the most similar name beside it or in runs/, and some
    of the names there. Empty if there is none. `manifests`: also files that end in .toml."""
    found = list(dict.fromkeys(_entries(path, runs, manifests)))
    if not found:
        return ""
    names = {place.name: place for place in reversed(found)}
    close = [names[name] for name in get_close_matches(path.name, names, n=1)]
    asked = f"; did you mean {close[0]}?" if close else ";"
    listed = ", ".join(str(place) for place in found[:MOST_NAMED])
    return f"{asked} there are: {listed}" + (", …" if len(found) > MOST_NAMED else "")


def _entries(path: Path, runs: bool, manifests: bool) -> Iterator[Path]:
    """The runs and manifests in the directory of `path` and in runs/."""
    folders = {folder.resolve(): folder for folder in (path.parent, Path("runs"))}  # runs/ by its short name
    for folder in folders.values():
        with suppress(OSError):
            for place in sorted(folder.iterdir()):
                if (runs and (place / "config.toml").is_file()) or (
                    manifests and place.suffix == ".toml" and place.is_file()
                ):
                    yield place
