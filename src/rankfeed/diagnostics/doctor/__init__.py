"""Whether any loader delivers each sample once: it is run in real processes and judged by what it delivers."""

from rankfeed.diagnostics.doctor.examination import Examination, examine

__all__ = ["Examination", "examine"]
