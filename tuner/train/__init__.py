"""The trainer: device, graphs, model, steps, loop, checkpoints. Imports MindSpore."""
