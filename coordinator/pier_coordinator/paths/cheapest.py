"""The cheapest path from each site, compiled: a shortest walk over layers of sites."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pier_coordinator.paths.compiled import compiled
from pier_coordinator.paths.kernel import Ints

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@compiled
def cheapest(visit: Floats, hop: Floats, group: Ints, allowed: Bools, origin: int, walk: Ints) -> float:
    """Cost of the cheapest closed walk from a site over L - 1 others; infinite if there is none.

    Args:
        visit: [N], cost of a site that is visited, the origin left out.
        hop: [N, N], cost of going there and back.
        group: [N], what `allowed` [G, G] says of going from one site to another.
        walk: [L], becomes the sites of the walk.
    """
    sites, length = len(visit), len(walk)
    cost = np.full((length, sites), np.inf)
    came = np.zeros((length, sites), np.int64)
    cost[0, origin] = 0.0
    for layer in range(1, length):
        for site in range(sites):
            if site == origin:
                continue
            for before in range(sites):
                if before == site or not allowed[group[before], group[site]]:
                    continue
                total = cost[layer - 1, before] + hop[before, site] + visit[site]
                if total < cost[layer, site]:
                    cost[layer, site] = total
                    came[layer, site] = before
    last = np.argmin(cost[length - 1] + hop[:, origin])
    total = cost[length - 1, last] + hop[last, origin]
    for layer in range(length - 1, -1, -1):
        walk[layer] = last
        last = came[layer, last]
    return float(total)
