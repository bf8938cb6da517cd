"""The networks in torch, cut into parts, and one forward and backward of each part."""
