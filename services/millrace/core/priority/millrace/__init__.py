"""Millrace's own order: every class in time, and every wait bounded.

Read `policy` (the rule), then `attainment` (what a request is worth), `forecast` (what is yet to
come), `late_line` (those that can't all be in time, and those that never had an objective) and
`tenants` (who gives way to whom inside a class).
"""
