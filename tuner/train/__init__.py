"""The trainer: device, graphs, model, steps, loop, checkpoints. Imports MindSpore."""

import os

# Quiet, unless the user asks for more: MindSpore warns about its own deprecations and about every
# device it was not built for, and prints what it raises with its C++ call stack. It reads this
# once, when it is imported.
_level = os.environ.setdefault("GLOG_v", "4")
# msrun says at another level which rank has ended; what its ranks say stays as it was.
os.environ.update({"GLOG_v": os.environ.get("VARSEQ_TUNER_LOG_LEVEL", _level)})
