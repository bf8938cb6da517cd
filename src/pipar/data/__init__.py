"""Datasets and shards.

Reading order: `catalog` (the known datasets), `request` (which part of one is asked for), `fetch` (downloads with
checksums), `formats` (file formats), `images` (samples in memory), `datasets` (reading the known ones), `user_samples`
and `user_targets` (the samples and targets of a user's dataset), `user_datasets` (one dataset or several), `partition`
(which device gets which samples), `shard` (batches of one device's samples).
"""
