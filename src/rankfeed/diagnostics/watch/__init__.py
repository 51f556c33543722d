"""Figures of a loader while it is iterated: a console line, curves, or an endpoint for Prometheus."""
