"""Engines build the batches of a schedule ahead of need: in threads, or in processes."""
