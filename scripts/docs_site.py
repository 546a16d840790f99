"""What `mkdocs build` needs besides docs/: the references, made from code, and files elsewhere that pages link to.

Nothing is written into docs/. A link such as `../configs/swarm.toml` works where the repository is browsed and on the
site, to which the file is copied.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from swarm_node.config.writing import config_reference
from swarm_node.observability.metrics_reference import METRICS

ROOT = Path(__file__).parents[1]
CONFIGURATION = """# Configuration reference

Every key is also a flag (`--set grpo.loss=gspo`), an environment variable (`SWARM_NODE_GRPO__LOSS=gspo`) and a key of a
TOML file (`--config`); a flag beats the environment, that a file, that the default. An unknown key is an error that
names the nearest known one. `swarm-node config reference` prints this page, `swarm-node config show` what is in force.

"""
METRICS_PAGE = """# Metrics reference

A run writes one line a round to `metrics.jsonl` in its directory; in a long run, [old rounds share
lines](../dashboard.md#long-runs). Names are TRL's where it has one. Numbers that a
round has not are left out of its line.

"""
MOVED = {
    "docker/spot.md": "spot.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/recovery/report.md": "recovery.md",
    "swarm_node/observability/metrics_reference.py": "reference/metrics.md",
}
"""File of the repository -> its place on the site."""
ELSEWHERE = re.compile(r"\]\(\.\./([^)#]+)")
TITLES = {"recovery.md": "# Losing a stage: all figures\n\n"}


def metrics_reference() -> str:
    """A Markdown table of names and meanings for each section."""
    parts = []
    for title, names in METRICS.items():
        rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in names.items())
        parts.append(f"## {title}\n\n| name | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def as_page(reference: str) -> str:
    """What is written for a terminal: headings a level higher, `<` as itself outside code, names of pages as links."""
    text = re.sub(r"^###", "##", reference, flags=re.MULTILINE)
    text = re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", text)
    return re.sub(r"(?:docs|docker)/(\w+\.md)", r"[\1](../\1)", text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not lie in docs/."""
    pages = {
        "reference/configuration.md": CONFIGURATION + as_page(config_reference()),
        "reference/metrics.md": METRICS_PAGE + metrics_reference(),
    }
    for source in {*MOVED, *linked()}:
        pages.setdefault(place_of(source), TITLES.get(place_of(source), "") + (ROOT / source).read_text())
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def linked() -> set[str]:
    """Files elsewhere in the repository that pages link to."""
    return {source for page in (ROOT / "docs").glob("*.md") for source in ELSEWHERE.findall(page.read_text())}


def place_of(source: str) -> str:
    """On the site; where it is in the repository, seen from docs/, unless `MOVED` says otherwise."""
    return MOVED.get(source, source.removeprefix("docs/"))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links from docs/ to what lies elsewhere in the repository, as they are on the site."""
    if "/" in page.file.src_uri:  # in a folder of the site, where `..` is the site
        return markdown
    return ELSEWHERE.sub(lambda link: f"]({place_of(link[1])}", markdown)
