"""`python -m specdec` is the command `specdec`."""

from specdec.cli import main

main()
