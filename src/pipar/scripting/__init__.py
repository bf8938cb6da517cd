"""Objects for scripts and notebooks, made of the same parts as the commands.

Reading order: `plans` (chosen plans, and why). `launch.run` trains, `storage.result` is what it returns.
"""
