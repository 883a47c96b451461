"""What a site does next: one task at a time, in the order of the planner's simulator (paths/kernel.py).

Tasks of earlier waves go first, then those that came first, and new microbatches of the site itself last. A forward
needs a free place in memory, which its backward gives back. If paths go back to an earlier stage, microbatches could
wait for each other's places in a circle: then a new one waits for the one in its place of the wave before.
"""

from __future__ import annotations

from pier_node.pipeline.itinerary import Plan, Task


class Desk:
    """The tasks of one site in one attempt.

    Args:
        memory: microbatches in flight that the site can hold.
    """

    def __init__(self, plan: Plan, node: str, memory: int) -> None:
        self._plan, self._memory = plan, memory
        self._waiting: list[Task] = []
        self._held: set[int] = set()
        self._left = {*plan.tasks(node)}
        self._wave = {microbatch: number for number, wave in enumerate(plan.waves) for microbatch in wave}
        self._new = [[it for it in wave if plan.ways[it][0] == node] for wave in plan.waves]
        self._over: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self._left

    @property
    def awaited(self) -> set[Task]:
        """Tasks for which something has to arrive yet."""
        return {task for task in self._left if task[1] > 0 and task not in self._waiting}

    def arrive(self, task: Task) -> None:
        """What a task works on is here."""
        self._waiting.append(task)
        self._waiting.sort(key=lambda it: self._wave[it[0]])

    def next(self) -> Task | None:
        """Takes the task to do now; None: nothing can be done."""
        for task in self._waiting:
            if not self._is_forward(task) or len(self._held) < self._memory:
                self._waiting.remove(task)
                return self._taken(task)
        fresh = self._fresh()
        return None if fresh is None or len(self._held) >= self._memory else self._taken((fresh, 0))

    def done(self, task: Task) -> None:
        """It is."""
        microbatch, hop = task
        if hop > self._plan.length(microbatch):
            self._held.discard(microbatch)
        if hop == 2 * self._plan.length(microbatch):
            self._over.add(microbatch)
        self._left.discard(task)

    def _taken(self, task: Task) -> Task:
        if self._is_forward(task):
            self._held.add(task[0])
        return task

    def _is_forward(self, task: Task) -> bool:
        return task[1] < self._plan.length(task[0])

    def _fresh(self) -> int | None:
        """The own microbatch to begin with next."""
        before: list[int] = []
        for wave in self._new:
            for place, microbatch in enumerate(wave):
                begun = (microbatch, 0) not in self._left or microbatch in self._held
                if not begun:
                    free = self._plan.ascends or place >= len(before) or before[place] in self._over
                    return microbatch if free else None
            before = wave
        return None
