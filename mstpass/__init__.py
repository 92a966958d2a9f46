"""mstpass: a torch.compile backend that trains transformers on long sequences, in chunks."""

from mstpass.options import OptionError, Options
from mstpass.plans import ChunkPlan, Rejection
from mstpass.report.report import Report
from mstpass.report.store import reports

__version__ = "0.1.0"
__all__ = ["ChunkPlan", "OptionError", "Options", "Rejection", "Report", "reports"]
