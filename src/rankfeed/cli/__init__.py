"""The ``rankfeed`` command."""

from rankfeed.cli.app import main

__all__ = ["main"]
