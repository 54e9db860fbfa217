"""Orders of tasks."""

from __future__ import annotations

import random

from hapsynth.search.scheduling.tasks import TaskGraph


def random_order(rng: random.Random, tasks: TaskGraph) -> list[int]:
    """Each task after its makers."""
    missing, order = [len(set(makers)) for makers in tasks.makers], list[int]()
    free = [t for t, needs in enumerate(missing) if not needs]
    while free:
        order.append(free.pop(rng.randrange(len(free))))
        for user in set(tasks.users[order[-1]]):
            missing[user] -= 1
            if not missing[user]:
                free.append(user)
    return order
