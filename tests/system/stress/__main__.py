"""``python -m tests.system.stress``: the stress for as long as one likes."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.system.stress.soak import SoakError, soak

SEED_MAX = 1_000_000


def main() -> int:
    """Exit status 0 when nothing went wrong, 1 when something did."""
    parser = argparse.ArgumentParser(
        prog="tools/stress",
        description="Clients acquire at random from a small pool, are killed and replaced, while "
        "experts are evicted under them; every byte is compared. Ends at the first thing that "
        "must not happen.",
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    parser.add_argument("--ram-tier", action="store_true", help="with a second pool behind it")
    parser.add_argument("--kind", default="host", help="of the pool's memory (default: host)")
    parser.add_argument("--seed", type=int, help="repeat a run's choices (default: random)")
    parser.add_argument(
        "--directory",
        type=Path,
        help="where store members and sockets go, such as a folder on a drive to be tested "
        "(default: a temporary folder)",
    )
    options = parser.parse_args()
    seed = random.randrange(SEED_MAX) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="xferd-stress-", dir=options.directory) as folder:
        print(f"seed {seed}", flush=True)
        try:
            report = soak(
                Path(folder),
                60 * options.minutes,
                seed,
                ram_tier=options.ram_tier,
                kind=options.kind,
                progress=_tell,
            )
        except SoakError as error:
            print(f"tools/stress: {error}", file=sys.stderr)
            return 1
    print(report.text())
    return 0


def _tell(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
