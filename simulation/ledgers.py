"""The privacy budgets of all devices as an outsider can count them: on the links, in their files, at the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pipar.privacy.budget import PrivacyAccountant
from pipar.wire.frames import Frame
from pipar.wire.messages import Kind
from simulation.checks import Checks
from simulation.invariants import Ledger, budget_is_kept, budget_stops_in_time, server_count_is_between
from simulation.scenario import Privacy


class Ledgers:
    """Counts the updates that each device sends, and compares the counts of all parties."""

    def __init__(self, privacy: Privacy | None, folder: Path, checks: Checks) -> None:
        self._privacy = privacy
        self._folder = folder
        self._checks = checks
        self._sent: dict[str, set[tuple[int, int]]] = {}  # by device: session and number of each END_EPOCH

    @property
    def is_kept(self) -> bool:
        return self._privacy is not None

    def path(self, device: str) -> Path:
        """Return the file in which a device keeps its budget."""
        return self._folder / f"{device}.json"

    def sent(self, device: str, frame: Frame) -> None:
        """A device sends a frame: that of an update must be in its file already."""
        if self._privacy is not None and frame.message.kind is Kind.END_EPOCH:
            sent = self._sent.setdefault(device, set())
            sent.add((frame.session, frame.sequence))  # sent again over a new connection, it is the same update
            self._checks.check(budget_is_kept, self._of(device))

    def stopped(self, device: str) -> None:
        """A device has ended because its budget is spent."""
        self._checks.check(budget_stops_in_time, self._of(device))

    def round_is_over(self, accountant: PrivacyAccountant, log: Mapping[int, Mapping[str, int]]) -> None:
        """Compare the server's count of each device with the rounds that it counts in, and with its own count."""
        for device in self._sent if self._privacy is not None else ():
            if not self._checks.is_excused(device):
                counted = sum(device in counted for counted in log.values())
                known = accountant.of(device).releases
                self._checks.check(server_count_is_between, device, counted, known, self._of(device).on_file)

    def _of(self, device: str) -> Ledger:
        assert self._privacy is not None
        on_file = int(json.loads(self.path(device).read_text("utf-8"))["releases"])
        return Ledger(device, len(self._sent.get(device, ())), self._privacy.releases, on_file)
