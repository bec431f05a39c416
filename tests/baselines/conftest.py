"""Makes the driver of caches and the helpers for coded rows importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kvcache"))
