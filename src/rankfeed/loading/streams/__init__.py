"""Iterables of unknown length, read by all ranks with a synchronized end."""
