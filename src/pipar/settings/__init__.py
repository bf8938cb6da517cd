"""Settings: the configuration of a training, and the tables of what can be chosen in it.

In reading order:

- `config`: the configuration, and the sections about runs, networks, data, plans, the server, privacy and devices
- `training_sections`: the sections about the loss and the optimiser
- `values`: what single keys may be; `sample_tensors`: what one sample is
- `config_file`: a configuration from a TOML file, overridden by `--set`
- `links`: the links of devices, by name or by rate
- `aggregators`, `optimizers`, `schedules`, `metrics`: what can be chosen by name, with its parameters
- `wording`: phrases about settings that several outputs share
"""
