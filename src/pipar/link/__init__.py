"""Channels between a device and the server: shaped, in memory or over gRPC."""
