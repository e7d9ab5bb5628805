"""The trainer: device, graphs, model, steps, loop, checkpoints. Imports MindSpore."""

import os

# Quiet, unless the user asks for more: MindSpore warns about its own deprecations and about every
# device it was not built for, and what it raises it also prints with its C++ call stack. Read once,
# when mindspore is imported.
os.environ.setdefault("GLOG_v", "4")
