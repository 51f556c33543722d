"""Figures of a loader while it is iterated: a console line, curves, or an endpoint for Prometheus."""

from rankfeed.diagnostics.watch.watching import Watch, watch

__all__ = ["Watch", "watch"]
