"""Runs llama.cpp's own server from the wheel ``xllamacpp`` until a signal ends it. It does not need the package
shadowkv.

``benchmarks.peer.llama_cpp`` starts this module with a Python that has the wheel, and stops it.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="of decode steps, and of prompts")
    parser.add_argument("--slots", type=int, required=True, help="sequences that run at once")
    parser.add_argument("--context", type=int, required=True, help="tokens of each")
    args = parser.parse_args()
    print("xllamacpp", xllamacpp.__version__, flush=True)
    params = xllamacpp.CommonParams()
    params.model.path, params.port = args.model, args.port
    params.n_parallel, params.n_ctx = args.slots, args.slots * args.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.cache_ram_mib = 0  # no cache of finished requests' prompts, because no prompt is sent twice
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    server = xllamacpp.Server(params)
    signal.sigwait(stop)
    del server


if __name__ == "__main__":
    main()
