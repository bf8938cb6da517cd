"""The page that a run leaves behind: what it was, where its time went, and what would make it faster."""

from pipar.report.page import render
from pipar.report.record import RunRecord
from pipar.report.writing import leave_comparison, leave_report, write_comparison, write_report

__all__ = ["RunRecord", "leave_comparison", "leave_report", "render", "write_comparison", "write_report"]
