"""Images: where they lie, how they are read, who gets which, and what a batch of them is."""
