"""Runners execute the tasks of a write: processes of this machine, a Ray cluster, or the ranks of a job."""
