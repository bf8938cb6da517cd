"""Connections.

Reading order: `channel` (messages to one peer, over any transport), `outbox` (messages to send or to send again),
`byte_counts` (what travels in an epoch), `interface` (what a transport is), `in_memory` (one of the two transports),
`grpc_stream`, `grpc_listener` and `grpc_connect` (the other: a stream, the server's end, the device's end),
`congestion` (how its connections fill a link), `shaping` and `delay_line` (emulated rates and latency),
`rate_estimate` (the rate of a real link), `link_trial` (the same before a training), `limits` (the resources that a
server grants one peer), `open_files` (how many connections the system's limit of open files leaves room for),
`heartbeat` (signs of life), `reconnect` and `backoff` (a lost connection), `tls`, `certificates`, `credentials` and
`authenticator` (which devices may connect), `reloading` (files of credentials that change), `expiry` (certificates
that expire soon), `health` (gRPC's health service), `diagnosis` (why a connection is refused), `addresses` (whether a
program can listen there).
"""
