"""One training of a comparison, in a process of its own: `python -m weft.comparison.worker OUT ENTRY SEED`."""

import sys
from pathlib import Path

from weft.comparison.plan import read_plan
from weft.comparison.run import work
from weft.errors import WeftError


def main(out: Path, name: str, seed: int) -> str | None:
    """Train and evaluate an entry of the comparison in a folder; return why that failed."""
    plan = read_plan(out)
    entry = next(entry for entry in plan.entries if entry.name == name)
    try:
        return work(plan, entry, seed, out)
    except WeftError as error:
        return str(error).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
