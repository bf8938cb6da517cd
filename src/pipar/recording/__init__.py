"""The flight recorder: what a training did and when, without data and weights, in one compact file.

Reading order: `frames` (the file: compressed lines of JSON), `compact_times` (many times in few characters),
`micro_batch_sizes` (which samples each micro-batch has), `stage_times` (how long the work of a round took, from its
spans), `flight` (the records of a file), `writer` (the thread that writes them), `recorder` (noting them during a
training), `lookup` (times and rates for a replay), `moment` (what happened around a time), `deviation` (whether a
replay can be trusted).
"""
