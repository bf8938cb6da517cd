"""The live page: what a browser shows while a training goes on."""
