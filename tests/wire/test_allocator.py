from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import resource
from pier_node.wire.links import keep_chunk_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        chunks = [bytes([1]) * (1 << 20) for _ in range(8)]
        del chunks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
keep_chunk_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="no glibc here")
def test_chunks_reuse_the_memory_of_those_before() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    before, after = map(int, done.stdout.split())
    assert before > 10_000  # 160 MiB in pages of 4 KiB are 40960
    assert after < before / 10
