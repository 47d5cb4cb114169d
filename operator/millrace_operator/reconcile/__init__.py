"""Decides: takes the wanted and the observed state, and returns the actions to do now.

Pure and level-triggered: all memory is in the objects' status, so the operator may be stopped and
started at any time. A second pass over the result of a first pass returns no actions.
"""
