"""What the activations at a cut reveal about the inputs.

Reading order: `measures` (how much activations reveal), `attacks` (rebuilding inputs from activations), `table` (the
file of measurements), `limit` (the cuts that it rules out), `picture` (the rebuilt images).
"""
