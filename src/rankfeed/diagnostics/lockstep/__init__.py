"""Ranks of a running job that watch over each other: a hang becomes an error that says who, where and why."""

from rankfeed.diagnostics.lockstep.lockstep import Lockstep

__all__ = ["Lockstep"]
