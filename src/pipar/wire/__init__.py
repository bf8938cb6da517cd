"""Messages and their bytes.

Reading order: `messages` (kinds and bodies), `orders` (what a device receives when it joins), `frames` (the wire
format: messages to bytes and back), `encodings` (their names, and how tensors are cut into chunks), `tensor_codec`
(tensors to bytes and back), `exact` and `lossy` (the encodings themselves), `bitpacking` (sections, masks and byte
planes, which encoded bytes consist of), `model_changes` (models as changes).
"""
