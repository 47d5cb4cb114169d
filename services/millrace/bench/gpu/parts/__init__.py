"""The parts of `millrace bench gpu`: each module has `check(context)`, which `part.py` calls."""
