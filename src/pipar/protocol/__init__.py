"""What is said between device and server, and its bytes. No socket, no torch."""
