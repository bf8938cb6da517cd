"""Settings: the configuration that a training is described by, and the tables of what may be chosen in it.

In reading order:

- `config`: the configuration, and the sections about runs, networks, data, plans, the server, privacy and devices
- `training_sections`: the sections about the loss and the optimiser
- `values`: what single keys may be
- `config_file`: a configuration as a TOML file, with `--set` over it
- `links`: the links of devices, by name or by rate
- `aggregators`, `optimizers`, `schedules`, `metrics`: what can be chosen by name, with its parameters
- `wording`: phrases about settings that several outputs share
"""
