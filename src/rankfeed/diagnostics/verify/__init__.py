"""Verifies the deliveries of a plan, the files of a dataset, and what a job delivered by its ledgers."""
