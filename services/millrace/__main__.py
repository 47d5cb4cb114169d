"""`python -m millrace`: the command line, for environments whose `bin` is not on PATH."""

from millrace.cli.main import main

main()
