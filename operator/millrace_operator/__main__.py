"""Runs the operator: `python -m millrace_operator`."""

from millrace_operator.main import main

main()
