"""The version of Millrace: the one of pyproject.toml, as it was installed."""

from importlib import metadata


def version() -> str:
    """Such as 0.1.0."""
    return metadata.version("millrace")
