"""Write the sets: `python -m benchmarks.real_sets`."""

from __future__ import annotations

from benchmarks.real_sets import SETS, path_of, text

if __name__ == "__main__":
    for name in SETS:
        path_of(name).write_text(text(name))
        print(path_of(name))
