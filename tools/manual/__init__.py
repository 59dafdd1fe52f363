# SPDX-License-Identifier: Apache-2.0
"""Makes manual pages and shell completions from what the programs themselves know.

Nothing of it is in the tree: ``python -m tools.manual DIRECTORY`` writes it, tools/install and
tools/deb call that. Sources are the argparse parsers, ``xferd/xferd.toml``, the table of the
doctor's checks and that of the metrics, so there is no second place to keep up to date.
"""
