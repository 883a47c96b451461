"""How long PyTorch's threads spin while they wait for one another; to be said before PyTorch is loaded.

For long, as is their default, they keep each other waiting where another program wants a core: an answer of six experts
took 14.2 s beside one busy process on two cores, 3.9 s without. Never, and each small operation waits for threads to
wake: 4.4 s, but a training step takes a fifth to a third longer on a quiet machine. After a little: 4.1 s, and training
is slower only beside the busy process, by a fifth.
"""

from __future__ import annotations

import os


def spin_little() -> None:
    """Unless the environment says otherwise."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # GNU's library goes by this alone
