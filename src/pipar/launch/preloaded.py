"""Imported by the fork server when it starts: what all child processes need."""

from __future__ import annotations

from pipar.launch.loading import preload

preload()
