"""What several test files share."""

from __future__ import annotations

import os

# Threads of two libraries on two cores only get in each other's way in tests.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing is ever downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
