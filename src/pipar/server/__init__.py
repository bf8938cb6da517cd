"""Algorithm 2: the server's program.

Reading order: `program` (the training, round by round), `membership` (devices join, are lost and come back),
`session` (one device's part), `enrolment` (which devices may take part, by which orders), `turn_order` (the turns of
devices that share one server-side model), `validation`, `liveness` (devices that have fallen silent),
`epoch_results` (the numbers of each epoch).
"""
