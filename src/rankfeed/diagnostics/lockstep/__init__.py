"""Lockstep: ends a hanging job with an error that names the rank, the position and the cause."""

from rankfeed.diagnostics.lockstep.lockstep import Lockstep

__all__ = ["Lockstep"]
