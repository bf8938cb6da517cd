"""The paper's evaluation on a virtual testbed: what is run, what came out, and how it compares with what was printed."""
