"""What leaves a device says something about its data: how much, what noise does about it, and what that has cost."""
