"""What is wrong with any loader: it is run in real processes, in several ways, and its findings are told."""

from rankfeed.diagnostics.doctor.examining import UNPROVEN, Examination, examine
from rankfeed.diagnostics.doctor.findings import Finding

__all__ = ["UNPROVEN", "Examination", "Finding", "examine"]
