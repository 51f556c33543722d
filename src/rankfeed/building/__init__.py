"""Data made ready: prepared once, packed."""

from rankfeed.building.pack import pack
from rankfeed.building.prepare import Preparation, prepare_once

__all__ = ["Preparation", "pack", "prepare_once"]
