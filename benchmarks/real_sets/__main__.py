"""Write the sets: `python -m benchmarks.real_sets`."""

from __future__ import annotations

import argparse

from benchmarks.real_sets import SETS, path_of, text


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in SETS:
        path_of(name).write_text(text(name))
        print(path_of(name))


if __name__ == "__main__":
    main()
