"""`python -m weft`: the command line, also for `torchrun -m weft`."""

from weft.cli.main import main

main()
