"""The limits of this process's container or job, as Linux's control groups set them.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """(version 1 or 2, folder) of each control group of this process, and of all above it, that may limit `controller`
    ("memory", "cpu"). A container may see only the top group, which is its own then."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, top = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, top = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        group = top / path.strip("/")
        yield from ((version, folder) for folder in (group, *group.parents) if folder.is_relative_to(top))


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """CPU seconds per second that the control groups of this process allow, as far as they have limits."""
    for version, folder in control_groups("cpu", root):
        if version == 2 and (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        elif version == 1 and (folder / "cpu.cfs_quota_us").exists():
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
        else:
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def free_main_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory left to this machine, or to the container or job of this process; 0 = not known."""
    try:
        fields = _numbers((root / "proc/meminfo").read_text().replace(":", ""))
        return min([1024 * fields["MemAvailable"], *_memory_left(root)])
    except (OSError, KeyError):
        return 0


def _memory_left(root: Path) -> Iterator[int]:
    """Bytes left to each control group that bounds the memory of this process; caches count as free."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for version, folder in control_groups("memory", root):
        limit, used, cache = names[version]
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            cached = _numbers((folder / "memory.stat").read_text()).get(cache, 0)
            yield max(1, int(most) - int((folder / used).read_text()) + cached)


def _numbers(text: str) -> dict[str, int]:
    """Parse lines of a name, a number and perhaps a unit."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
