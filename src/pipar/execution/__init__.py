"""Work on lanes in time.

Reading order: `stage_graph` (the stage graph: the stages of an iteration, and where the data of each comes from),
`schedule` (how an epoch is cut into batches and micro-batches, and the device's order), `work` (what a lane is given),
`clock` (the virtual-time event loop), `lanes` (threads, or virtual time, in which work runs), `spans` (when each lane
was busy or waiting; sums, idle time, Chrome trace events).
"""
