"""``shadowkv serve`` with a mock engine instead of a model.

python -m shadowkv.bench.mock_server --model llama-3.1-8b --load-format dummy --port 8000
"""

from __future__ import annotations

import sys
from functools import partial

from shadowkv.serve.__main__ import main
from shadowkv.serve.start import start_engine

if __name__ == "__main__":
    sys.exit(main(start=partial(start_engine, module="shadowkv.bench.mock_engine")))
