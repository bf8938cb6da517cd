"""The live page.

Reading order: `state` (what the page shows), `history`, `feed` (server-sent events), `access` (tokens), `web`
(HTTP), `serve` (starting it).
"""
