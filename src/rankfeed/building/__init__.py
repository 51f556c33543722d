"""Data sets written."""

from rankfeed.building.pack import pack

__all__ = ["pack"]
