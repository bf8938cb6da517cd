"""Algorithm 2: the server's program.

Reading order: `program` (the algorithm, round by round), `rounds` (the devices of a round, up to its deadline, and
their aggregation), `serving` (one device in a round), `at_once` (several of its micro-batches at the same time),
`replicas` (server-side models, own or shared) with `shared_model_turns`, `model_exchange` (models to and from devices),
`plan_updates` (current orders, and new plans between rounds), `participants` (devices get their orders before a round),
`sampling` (which devices are drawn for it), `device_evaluation` (the new model on their own samples), `expected_scores`
(one device's answer), `device_scores` (mean and worst decile).

Devices: `membership` (they join, are lost, resume and leave), `session` (the state of one device), `device_messages`
(their messages, checked), `name_conflicts` (two devices with one credential), `message_limits` (what they may send),
`link_measurement` (their links, when they join), `enrolment` (which may join, and their first plans), `allow_list`
(which of them the operator has named), `refusals` (those that may not).

How long they are waited for: `timeouts` (chosen from what is known), `learned_timeouts` (from the rounds so far),
`deadlines` (of a round), `lost_devices` (ends sessions of devices that show no sign of life), `silent_devices` (which
are silent, for the live page).

Around the training: `interfaces` (what a server is given), `validation`, `epoch_results` (the numbers of each epoch),
`progress`.
"""
