"""Whether any loader delivers each sample once: it is run in real processes and judged by what it delivers."""

from rankfeed.proof.doctor.examination import Examination, examine
from rankfeed.proof.doctor.findings import Finding

__all__ = ["Examination", "Finding", "examine"]
