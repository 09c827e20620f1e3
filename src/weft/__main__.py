"""`python -m weft`: the command line, also for `torchrun -m weft`."""

from weft.cli import main

main()
