"""``python -m shadowkv.engine.structured.trial_process FD``: compiles schemas to see whether that ends.

FD is the socket to the engine's process (``trials.py``), which sends a vocabulary first, and then schemas, one at a
time; each is answered once the compiler is done with it, which may refuse it. The grammar stays here. This process ends
when the other end is closed, whatever it is compiling, so that no engine leaves one behind.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from shadowkv.engine.structured.vocabulary import Vocabulary, compile_schema, new_compiler

NICENESS = 10
"""Its priority is lower than the engine's."""


def main(descriptor: int) -> NoReturn:
    """Compiles what comes, until the connection is closed; that ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole service: the engine's process sees to it
    with suppress(OSError):  # it is as low as it can be
        os.nice(NICENESS)
    engine, schemas = Connection(descriptor), queue.SimpleQueue[tuple[str, bool]]()
    with suppress(OSError, EOFError):
        vocabulary: Vocabulary = engine.recv()
        threading.Thread(target=_receive, args=(engine, schemas), daemon=True).start()
        compiler = new_compiler(vocabulary.info(), threads=1)
        engine.send(None)
        while True:
            with suppress(ValueError):  # the engine's compiler refuses it as well, and says why
                compile_schema(compiler, *schemas.get())
            compiler.clear_cache()  # the next one may take as long as it would elsewhere
            engine.send(None)
    os._exit(0)


def _receive(engine: Connection, schemas: queue.SimpleQueue[tuple[str, bool]]) -> NoReturn:
    with suppress(OSError, EOFError):
        while True:
            schemas.put(engine.recv())
    os._exit(0)  # in the middle of a compilation, which nothing else ends


if __name__ == "__main__":
    main(int(sys.argv[1]))
