"""Refusals, ends with objectives met or missed, and the breakers of failing instances."""
