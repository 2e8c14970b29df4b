"""Decoding runs, method against method: `python bench/e2e.py [options]` is `specdec bench [options]`."""

import sys

from specdec.cli import main

main(["bench", *sys.argv[1:]])
