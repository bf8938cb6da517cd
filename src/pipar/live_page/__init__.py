"""The live page.

Reading order: `state` (the training now), `history` (the runs so far, for the report's part), `feed` (server-sent
events), `access` (hosts and tokens), `web` (HTTP), `serve` (the page on its own thread).
"""
