"""Pipelined split federated learning across real devices, and their testbed in virtual time."""

from pipar.config import Config
from pipar.config_file import load_config
from pipar.errors import PiparError
from pipar.launch.run import Result, compare, run

__version__ = "0.1.0"
__all__ = ["Config", "PiparError", "Result", "compare", "load_config", "run"]
