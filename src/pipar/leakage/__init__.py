"""What cuts reveal.

Reading order: `measures` (how much activations give away), `attacks` (rebuilding inputs from them), `table` (the
file of measurements), `limit` (the cuts that it rules out), `picture` (what was rebuilt, as an image).
"""
