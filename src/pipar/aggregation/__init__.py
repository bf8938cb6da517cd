"""The next global model, from the models that devices and replicas have trained.

Reading order: `averaging` (the weighted mean, with exact sums), `aggregators` (FedAvg and server optimisers),
`robust_aggregators` (Krum, medians and trimmed means), `named_aggregators` (by the name in the configuration),
`update_check` (models that are far from those of all other devices).
"""
