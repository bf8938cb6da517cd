"""The networks that come with pipar.

`models` builds them by name; `vgg`, `resnet` and `mobilenet` define them, from the building blocks in `blocks`.
"""
