"""Finds and runs the fastest way to train on sequences of different lengths with MindSpore."""

__version__ = "0.1.0"
