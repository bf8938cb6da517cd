"""From measured layer times to {P, N} of each device: profile, cost model, estimate, choice."""
