"""Datasets and shards.

Reading order: `catalog` (what is known of each dataset), `fetch` (downloads with checksums), `formats` (file
formats), `datasets` (reading), `partition` (which device gets which samples), `shard` (batches of one device's
samples).
"""
