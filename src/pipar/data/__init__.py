"""Datasets and shards.

Reading order: `catalog` (the known datasets), `request` (which part of one is asked for), `fetch` (downloads with
checksums), `formats` (file formats), `datasets` (reading), `own_targets` (the targets of a user's dataset), `own_sets`
(one dataset or several), `partition` (which device gets which samples), `shard` (batches of one device's samples).
"""
