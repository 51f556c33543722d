"""How a loader is doing while it is iterated: a line, curves, or an endpoint to ask."""

from rankfeed.diagnostics.watch.watching import Watch, watch

__all__ = ["Watch", "watch"]
