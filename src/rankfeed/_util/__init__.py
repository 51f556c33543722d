"""Helpers without knowledge of data loading, for all packages above :mod:`rankfeed.errors`."""
