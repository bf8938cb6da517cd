"""Logs, metrics, progress and experiment trackers.

Reading order: `progress` (how far a training is), `logs` (log lines), `metrics` (Prometheus), `tracker` (what a tracker
is told), `tracker_threads` (a thread for each tracker), `tensorboard`, `mlflow`, `wandb`.
"""
