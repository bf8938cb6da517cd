"""Logs, metrics, progress and experiment trackers.

Reading order: `progress` (how far a training is), `event_text` (the sentence of each event), `logs` (log lines),
`foreign_lines` (those of other libraries), `metrics` (Prometheus), `metrics_endpoint` (serves them), `http_server`
(what it shares with the live page), `tracker` (the interface of trackers), `tracker_threads` (a thread for each
tracker), `tensorboard`, `mlflow`, `wandb`.
"""
