"""The page of a run.

Reading order: `record` (a run's folder, read back), `critical_path` (of an iteration), `timeline` (the lanes of an
iteration or epoch), `what_if` (predictions of what would be faster), `content` (everything as JSON), `page` (one HTML
file), `writing` (report.html of one run or of several).
"""

from pipar.report.page import render
from pipar.report.record import RunRecord
from pipar.report.writing import try_write_comparison, try_write_report, write_comparison, write_report

__all__ = ["RunRecord", "render", "try_write_comparison", "try_write_report", "write_comparison", "write_report"]
