"""Work on lanes in time.

Reading order: `stages` (the stages of an iteration and what each waits for: the stage graph), `schedule` (how an
epoch is cut into batches and micro-batches, and the device's order), `clock` (the virtual-time event loop), `lanes`
(where work runs: threads, or virtual time), `spans` (what a lane did from when to when; sums, idle time, Chrome
trace events).
"""
