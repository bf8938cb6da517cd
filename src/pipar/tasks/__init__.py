"""What is learned: losses, targets and scores.

Reading order: `losses` (the loss of a micro-batch, and its weight in the batch), `task` (a loss with the form of its
targets, and how these travel), `metrics` (scores by name), `evaluation` (a model's loss and scores on some samples).
"""
