"""`python -m millrace.cli`: the command line, as processes that start others name it."""

from millrace.cli.main import main

main()
