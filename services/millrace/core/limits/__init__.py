"""Limits of tenants and keys: what a request costs, and when it is refused."""
