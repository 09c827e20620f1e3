"""`python -m weft`: the command line, also for `torchrun -m weft`."""

from weft.cli.entry import main

main()
