"""Several processes share a directory, and some are killed: they never serve wrong data."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stored_snapshots import PATIENCE, data_of, found, header_of, names_of, opened, prompt, put, read

from shadowkv.prefix_cache.__main__ import main
from shadowkv.prefix_cache.disk.files import SnapshotGone

PROMPTS = [prompt(seed, 256) for seed in range(6)]
SIZE = header_of(PROMPTS[0][:128]).file_bytes
SECONDS = 3.0


def hammer(directory: Path, seed: int, results) -> None:
    """Stores, finds and reads for SECONDS, and until it has done some of each. Reports the number of each, and
    errors."""
    chance, counts, wrong = random.Random(seed), {"read": 0, "stored": 0, "gone": 0}, []
    with opened(directory, limit=7 * SIZE, watch_seconds=0.01) as tier:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or counts["read"] <= 20 or counts["stored"] <= 5:
            ids = chance.choice(PROMPTS)
            chain = found(tier, names_of(ids))
            parent = None
            try:
                for entry in chain:
                    if read(tier, entry, ids) != data_of(entry):
                        wrong.append(f"{entry.name} is not what was written")
                    if parent is not None and entry.parent_uid != parent.uid:
                        wrong.append(f"{entry.name} continues something else")
                    parent = entry
                    counts["read"] += 1
            except SnapshotGone:
                counts["gone"] += 1
                continue
            if len(chain) < 2:
                header = header_of(ids if chain else ids[:128], parent)
                stored = tier.put(header, ids[header.start : header.length], [data_of(header)]).result(PATIENCE)
                counts["stored"] += bool(stored)
            if chance.random() < 0.1:
                (directory / f"{chance.choice(names_of(ids))}.safetensors").unlink(missing_ok=True)
        stats = tier.stats()
        if stats.corrupt or stats.write_errors or stats.read_errors:
            wrong.append(str(stats))
    results.put((counts, wrong))


def test_processes_that_share_a_directory_never_read_anything_wrong(tmp_path, capsys):
    context = multiprocessing.get_context("spawn")  # what runs beside is not there after a fork
    results = context.Queue()
    processes = [context.Process(target=hammer, args=(tmp_path, seed, results)) for seed in range(2)]
    for process in processes:
        process.start()
    reports = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    for counts, wrong in reports:
        assert not wrong
        assert counts["read"] > 20 and counts["stored"] > 5
    assert main(["verify", "--dir", str(tmp_path)]) == 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


WRITER = """
import sys, time
from pathlib import Path
directory, tests, place = sys.argv[1:]
sys.path.insert(0, tests)
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from stored_snapshots import data_of, header_of, opened, prompt

def stop_at(here):
    if here == place:
        print("here", flush=True)
        time.sleep(600)

class Disk(FileSystem):
    def reserve(self, *given):
        stop_at("reserve")
        super().reserve(*given)

    def sync(self, *given):
        stop_at("sync")
        super().sync(*given)

    def publish(self, *given):
        stop_at("publish")
        return super().publish(*given)

def slabs(data):
    for begin in range(0, len(data), 100):
        stop_at(str(begin))
        yield data[begin : begin + 100]

with opened(Path(directory), files=Disk()) as tier:
    header = header_of(prompt(0))
    tier.put(header, prompt(0), slabs(data_of(header))).result()
"""


@pytest.mark.parametrize("place", ["reserve", "0", "100", "2900", "sync", "publish"])
def test_a_writer_that_is_killed_leaves_nothing_that_is_served(tmp_path, place):
    with opened(tmp_path) as tier:
        header = put(tier, PROMPTS[1])
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent), place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
    left = [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]
    assert len(left) == 1 and len(os.listdir(tmp_path)) == 2
    with opened(tmp_path) as tier:
        assert tier.stats().files == 1 and tier.stats().corrupt == 0
        assert found(tier, names_of(prompt(0))) == []
        assert read(tier, found(tier, names_of(PROMPTS[1]))[0], PROMPTS[1]) == data_of(header)
        assert put(tier, prompt(0))
    os.utime(tmp_path / left[0], (1, 1))
    with opened(tmp_path):
        assert not (tmp_path / left[0]).exists()


@pytest.mark.parametrize("cut", [0, 10, 5000, 600_000])
def test_what_a_killed_writer_leaves_is_not_looked_at(tmp_path, cut):
    with opened(tmp_path) as tier:
        header = put(tier, PROMPTS[0])
    path = tmp_path / header.file_name
    path.rename(tmp_path / ".tmp-1-0123456789abcdef")
    os.truncate(tmp_path / ".tmp-1-0123456789abcdef", cut)
    with opened(tmp_path) as tier:
        assert found(tier, names_of(PROMPTS[0])) == [] and tier.stats().files == tier.stats().corrupt == 0
        put(tier, PROMPTS[0])
