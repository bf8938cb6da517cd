"""`python -m pipar` is the command line."""

from pipar.cli import main

main()
