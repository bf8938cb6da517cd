"""Logs, metrics, progress, its display, and experiment trackers.

Reading order: `progress` (how far a training is), `event_text` (the sentence of each event), `epoch_lines` and
`display` (the terminal during a run), `notebook_display` (a notebook), `progress_display` (which of them), `logs` (log
lines), `third_party_logs` (those of other libraries), `metrics` (Prometheus), `metrics_endpoint` (serves them),
`http_server` (what it shares with the live page), `tracker` (the interface of trackers), `tracker_threads` (a thread
for each tracker), `tensorboard`, `mlflow`, `wandb`.
"""
