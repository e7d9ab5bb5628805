"""The trainer: device, graphs, model, steps, loop, checkpoints. Imports MindSpore."""

import os

# Quiet, unless the user asks for more: MindSpore warns about its own deprecations and about every
# device it was not built for, and prints what it raises with its C++ call stack. It reads this
# once, when it is imported.
os.environ.setdefault("GLOG_v", "4")
