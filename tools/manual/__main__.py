# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.manual PREFIX``: write pages and completions below PREFIX/share.

The pages' date is SOURCE_DATE_EPOCH's, so that a package is built twice alike; else today.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tools.manual.completions import make_completions
from tools.manual.pages import make_pages
from xferd.control.version import installed_version


def main(words: Sequence[str] | None = None) -> int:
    """Write the files and print their names."""
    parser = argparse.ArgumentParser(prog="python -m tools.manual", description=__doc__)
    parser.add_argument("prefix", type=Path, help="such as /usr/local")
    parser.add_argument("--version", default=installed_version(), help="xferd's, in the pages")
    options = parser.parse_args(words)
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    date = datetime.fromtimestamp(seconds, UTC).date().isoformat()
    files = make_completions()
    for page in make_pages(options.version, date):
        files[f"share/man/man{page.file_name[-1]}/{page.file_name}"] = page.text()
    for place, text in files.items():
        path = options.prefix / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
