"""Datasets written as Arrow IPC shards with a manifest."""

from rankfeed.writer.write import write

__all__ = ["write"]
