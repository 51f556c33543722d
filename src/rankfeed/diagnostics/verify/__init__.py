"""Verifies a plan's promises, a data set's bytes, and what a job delivered."""
