"""Data made ready: prepared once, packed."""

from rankfeed.building.pack import pack

__all__ = ["pack"]
