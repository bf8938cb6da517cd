"""Connections.

Reading order: `channel` (messages to one peer, over any transport), `in_memory` and `grpc` (the two transports),
`shaping` (emulated rates and latency), `rate_estimate` (the rate of a real link), `limits` (what one peer may take),
`reconnect` and `backoff` (coming back), `tls`, `certificates` and `credentials` (who may connect), `health`,
`diagnosis` (why a server cannot be reached), `addresses`.
"""
