"""Directories that are built by exactly one process while all others wait."""

from rankfeed.prepare.preparation import Preparation, prepare_once

__all__ = ["Preparation", "prepare_once"]
