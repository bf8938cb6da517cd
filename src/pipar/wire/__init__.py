"""What is said, and its bytes.

Reading order: `messages` (kinds, bodies), `orders` (what a device is told when it joins), `frames` (the wire format:
messages to bytes and back), `encodings` (their names), `codec` (the exact encodings), `lossy` (those that lose
something), `delta` (models as changes), `chunks` and `bitpacking` (what encoded bytes consist of).
"""
