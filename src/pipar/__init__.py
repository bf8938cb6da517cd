"""Pipelined split federated learning across real devices, and their testbed in virtual time."""

from pipar.config import Config
from pipar.config_file import load_config
from pipar.errors import PiparError
from pipar.launch.run import compare, run
from pipar.storage.result import Result

__version__ = "0.1.0"
__all__ = ["Config", "PiparError", "Result", "compare", "load_config", "run"]
