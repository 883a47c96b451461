"""Keeps a site's workers running: PyTorch's elastic agent, one worker process a device.

Run by the daemon as `python -m pier_node.inner.launch`. When one worker dies, all of them are restarted. It ends when
they end in peace, when they died too often, or with its daemon.
"""

from __future__ import annotations

import argparse
import os
import sys

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pier_node.inner import devices
from pier_node.inner.parent import die_with_parent


def main() -> None:
    """Run the workers. Exit code 1: they died too often."""
    die_with_parent()
    arguments = _arguments()
    workers = arguments.workers or devices.count()
    _set_environment()
    launch = elastic_launch(_config(arguments.socket, workers, arguments.max_restarts), sys.executable)
    try:
        launch("-m", "pier_node.inner.worker", arguments.socket)
    except ChildFailedError:
        sys.exit(1)  # the agent and the workers have said why


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="where the daemon listens")
    parser.add_argument("--workers", type=int, default=0, help="0: one for each device")
    parser.add_argument("--max-restarts", type=int, default=0)
    return parser.parse_args()


def _set_environment() -> None:
    # PyTorch's TCP store listens on every interface and unpickles what it is sent: none is opened here.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    # Threads that spin while they wait for one another make a step 30 times slower when something else wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _config(socket: str, workers: int, max_restarts: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id="site",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{socket}.rendezvous",
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=f"{socket}.elastic"),
    )


if __name__ == "__main__":
    main()
