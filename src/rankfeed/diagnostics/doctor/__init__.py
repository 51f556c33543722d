"""The doctor: runs any loader in real processes, and finds whether it delivers each sample exactly once."""

from rankfeed.diagnostics.doctor.examination import Examination, examine

__all__ = ["Examination", "examine"]
