"""A thread that makes the records of a flight and appends them to its file."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipar.job.job import Job
from pipar.profiling.profile import Profile
from pipar.recording import flight
from pipar.recording.frames import pack_record
from pipar.settings.links import link_tree
from pipar.storage.whole_files import append_whole, check_spare

#: Rounds, and records of all kinds, that may wait for the thread. In real time later ones are left out, so that a slow
#: disk does not fill the memory.
_MOST_WAITING_ROUNDS, _MOST_WAITING = 16, 10_000
#: A longer recording would be no bug report any more.
_MOST_BYTES = 256_000_000
#: What is kept in memory while the disk is full; later records are left out.
_MOST_PENDING_BYTES = 8_000_000

Make = Callable[[], dict[str, Any] | None]


class RecordWriter:
    """A thread that makes records and appends them to the file.

    A record that cannot be written is written with the next one. If the thread is too slow for the training, the
    training waits if it `can_wait`, as in virtual time; otherwise records are left out.
    """

    def __init__(self, path: Path, *, can_wait: bool = False) -> None:
        self.failure: OSError | None = None
        self._path = path
        self._room = _MOST_BYTES
        self._pending = b""
        self._devices: dict[str, dict[str, Any]] = {}
        self._profiles: list[Profile] = []
        self._can_wait = can_wait
        self._queue: queue.Queue[Make | None] = queue.Queue(_MOST_WAITING)
        self._room_for_rounds = threading.Semaphore(_MOST_WAITING_ROUNDS)
        self._thread = threading.Thread(target=self._run, name="flight recorder", daemon=True)
        self._thread.start()

    def put(self, make: Make) -> None:
        """Write the record that the function returns, if it returns one."""
        self._put(make)

    def put_round(self, job: Job, make: Make) -> None:
        """Write a round, and first the devices of the job that are new."""
        if self._room_for_rounds.acquire(blocking=self._can_wait) and not self._put(partial(self._round, job, make)):
            self._room_for_rounds.release()

    def _put(self, make: Make) -> bool:
        """Return whether the record will be written."""
        try:
            self._queue.put(make, block=self._can_wait)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (make := self._queue.get()) is not None:
            self._write(make)
        self._write(lambda: {"is": flight.END, "cpu_s": round(time.thread_time(), 6)})

    def _write(self, make: Make) -> None:
        """Write a record; a mistake of the recorder ends neither the training nor this thread."""
        try:
            if (record := make()) is not None:
                self._append(record)
        except Exception as error:  # noqa: BLE001
            with suppress(Exception):
                # Without its text, which may name paths.
                self._append({"is": flight.EVENTS, "events": [[0.0, "RecorderFailed", {"by": type(error).__name__}]]})

    def _round(self, job: Job, make: Make) -> dict[str, Any] | None:
        """Return a round; None if its devices cannot be written, without which it could not be read."""
        self._room_for_rounds.release()
        for spec in job.specs:
            profile = self._profile_number(job.device_profiles[spec.name])
            about = {
                "is": flight.DEVICE,
                "name": spec.name,
                "link": link_tree(spec.link),
                "speed": spec.speed,
                "samples": job.sizes[spec.name],
                "profile": profile,
            }
            if self._devices.get(spec.name) != about:
                if profile is None or not self._append(about):
                    return None
                self._devices[spec.name] = about
        return make()

    def _profile_number(self, profile: Profile) -> int | None:
        """Return the number of a profile; None if it cannot be written."""
        if profile not in self._profiles:
            if not self._append(profile_record(len(self._profiles) + 1, profile)):
                return None
            self._profiles.append(profile)
        return self._profiles.index(profile) + 1

    def _append(self, record: dict[str, Any]) -> bool:
        """Return whether a record is written, or kept until there is space."""
        frame = pack_record(record)
        if self._pending and not self._fits(frame):
            self._flush()
        if not self._fits(frame):
            return False
        self._pending += frame
        self._flush()
        return True

    def _fits(self, frame: bytes) -> bool:
        size = len(self._pending) + len(frame)
        return size <= self._room and (not self._pending or size <= _MOST_PENDING_BYTES)

    def _flush(self) -> None:
        try:
            check_spare(self._path, len(self._pending))
            append_whole(self._path, self._pending)
        except OSError as error:
            self.failure = error
            return
        self.failure = None
        self._room -= len(self._pending)
        self._pending = b""


def profile_record(number: int, profile: Profile) -> dict[str, Any]:
    text = json.dumps(_rounded(json.loads(profile.to_json())), separators=(",", ":"))
    return {"is": flight.PROFILE, "number": number, "profile": text}


def _rounded(value: Any) -> Any:
    """Return JSON with numbers of six digits: a profile scatters more than that."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
