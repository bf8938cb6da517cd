"""What keeps a device's data private: noise on what leaves it, and how much of its budget that has cost."""
