"""Telling operators.

Reading order: `progress` (how far a training is), `logs` (log lines), `metrics` (Prometheus), `tracker` and
`tracking` (what experiment trackers are told), `tensorboard`, `mlflow`, `wandb`.
"""
