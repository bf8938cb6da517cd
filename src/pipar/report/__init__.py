"""The page of a run.

Reading order: `record` (a run's folder, read back), `critical` (the critical path of an iteration), `timeline`,
`outlook` (what would be faster), `content` (everything as JSON), `page` (one HTML file), `writing`.
"""

from pipar.report.page import render
from pipar.report.record import RunRecord
from pipar.report.writing import leave_comparison, leave_report, write_comparison, write_report

__all__ = ["RunRecord", "leave_comparison", "leave_report", "render", "write_comparison", "write_report"]
