from __future__ import annotations

import subprocess
import sys

import psutil

CHILD = """
import time
from pier_node.base.processes import die_with_parent
die_with_parent()
print("armed", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_child_goes_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    assert "armed" in lines
    child = psutil.Process(int((lines - {"armed"}).pop()))
    parent.kill()
    assert parent.stdout.read() == ""  # ends only when the child, which has this pipe too, is gone
    assert psutil.wait_procs([child], timeout=60)[1] == []
    parent.wait(60)
