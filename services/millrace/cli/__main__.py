"""`python -m millrace.cli`: the command line, for processes that start other processes."""

from millrace.cli.main import main

main()
