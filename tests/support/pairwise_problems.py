"""Problems for the solver's tests, and their optimum by brute force."""

import itertools

import numpy as np

from hapsynth.search.solver import Edge, Problem, Resource

INF = np.inf


def random_problem(seed: int, resources: int = 0) -> Problem:
    """Small states and costs, both directions of edges (so multi-edges), ties, inf, isolated variables."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 8))
    forbidden = float(rng.choice([0.0, 0.15, 0.4]))
    density = rng.random() * 1.5
    sizes = [int(s) for s in rng.integers(1, 5, n)]

    def costs(shape):
        values = rng.integers(0, 6, shape).astype(float) if seed % 2 else rng.random(shape)
        return np.where(rng.random(shape) < forbidden, INF, values)

    unary = tuple(np.where(rng.random(s) < 0.8, np.nan_to_num(costs(s), posinf=9.0), costs(s)) for s in sizes)
    edges: list[Edge] = []
    for u, v in itertools.permutations(range(n), 2):
        if rng.random() < density / 2:
            g, h = (int(k) for k in rng.integers(1, 4, 2))
            edges.append(Edge(u, v, rng.integers(0, g, sizes[u]), rng.integers(0, h, sizes[v]), costs((g, h))))
    limited: list[Resource] = []
    for r in range(resources):
        usage = tuple(rng.integers(0, 5, s) * float(rng.random() < 0.8) for s in sizes)
        low, high = sum(u.min() for u in usage), sum(u.max() for u in usage)
        limit = np.floor(low + rng.random() * 0.6 * (high - low)) - float(rng.random() < 0.1)
        limited.append(Resource(usage, float(limit), f"r{r}"))
    return Problem(unary, tuple(edges), tuple(limited), offset=float(rng.integers(-2, 3)))


def knotted_problem(seed: int, resources: int = 0) -> Problem:
    """Five or six variables, nearly all pairs linked by rough tables: the reductions leave most of it standing."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5, 7))
    sizes = [int(s) for s in rng.integers(3, 5, n)]
    edges: list[Edge] = []
    for u, v in itertools.combinations(range(n), 2):
        table = rng.integers(0, 9, (4, 4)).astype(float) if seed % 2 else rng.random((4, 4)) * 9
        table[rng.random((4, 4)) < (0.2 if seed % 3 else 0.0)] = INF
        edges.append(Edge(u, v, rng.permutation(4)[: sizes[u]], rng.permutation(4)[: sizes[v]], table))
    limited: list[Resource] = []
    for r in range(resources):
        usage = tuple(rng.integers(0, 9, s).astype(float) for s in sizes)
        limited.append(Resource(usage, float(rng.integers(2 * n, 4 * n)), f"r{r}"))
    return Problem(tuple(rng.random(s) for s in sizes), tuple(edges), tuple(limited), offset=1.0)


def brute_force(problem: Problem) -> float:
    if not problem.unary:
        return problem.offset
    x = np.indices([row.size for row in problem.unary]).reshape(len(problem.unary), -1)
    cost = problem.offset + sum(row[s] for row, s in zip(problem.unary, x, strict=True))
    for e in problem.edges:
        cost = cost + e.table[e.gu[x[e.u]], e.gv[x[e.v]]]
    for r in problem.resources:
        used = sum(row[s] for row, s in zip(r.usage, x, strict=True))
        cost = np.where(used <= r.limit, cost, INF)
    return float(cost.min())


def middle_problem(seed: int, limited: bool) -> Problem:
    rng = np.random.default_rng(seed)
    n = 50
    sizes = [int(s) for s in rng.integers(2, 8, n)]
    pairs = [(k, k + d) for k in range(n) for d in (1, 2, 7) if k + d < n and (d == 1 or rng.random() < 0.5)]
    edges: list[Edge] = []
    for u, v in pairs:
        table = np.where(rng.random((3, 4)) < 0.15, INF, np.round(rng.random((3, 4)), 1))
        edges.append(Edge(u, v, rng.integers(0, 3, sizes[u]), rng.integers(0, 4, sizes[v]), table))
    unary = tuple(np.round(rng.random(s), 1) for s in sizes)
    if not limited:
        return Problem(unary, tuple(edges))
    usage = tuple(np.round((1.1 - row) * 4 + rng.random(row.size)) for row in unary)
    return Problem(unary, tuple(edges), (Resource(usage, float(sum(u.mean() for u in usage)) * 0.9, "bytes"),))


def grid(side: int = 8) -> Problem:
    rng = np.random.default_rng(0)
    pairs = [(k, k + d) for k in range(side**2) for d in (1, side) if k + d < side**2 and (d == side or (k + 1) % side)]
    edges = tuple(Edge(u, v, np.arange(4), np.arange(4), rng.integers(0, 9, (4, 4)).astype(float)) for u, v in pairs)
    return Problem(tuple(rng.random(4) for _ in range(side**2)), edges)


LAYOUTS = ("R", "S0", "S1")
SOURCES = {"R": 5e-6, "S0": 0.0, "S1": 0.0}


class TrainingLike:
    """Ops with sharding rules on one axis of 8 devices. A state is (rule, layouts made available); edges are 0/inf:
    the layout a rule needs must be available. Forward, backward with skips, and an optimizer tied to its state."""

    def __init__(self, layers: int):
        self.unary: list[np.ndarray] = []
        self.edges: list[Edge] = []
        self.states: list[list[tuple[tuple[str, ...], str, tuple[str, ...]]]] = []
        x, tape = self.source(16e6), []
        for k in range(layers):
            w = self.source(4e6 * (1 + k % 3))
            h = self.matmul(x, w, 16e6, 2e-3)
            y = self.pointwise([h], 16e6)
            tape.append((x, h, w))
            x = self.pointwise([y, x], 16e6, linear=True)
        g = self.pointwise([x], 16e6)
        for x, h, w in reversed(tape):
            dh = self.pointwise([g, h], 16e6)
            size = 4e6
            dw = self.matmul(x, dh, size, 2e-3)
            g = self.pointwise([self.matmul(dh, w, 16e6, 2e-3), g], 16e6, linear=True)
            m = self.source(size)
            m2 = self.pointwise([m, dw], size)
            self.tie(m2, m)
            self.tie(self.pointwise([w, m2], size), w)

    def problem(self) -> Problem:
        return Problem(tuple(self.unary), tuple(self.edges))

    def source(self, size: float) -> int:
        return self.op([((), layout, cost) for layout, cost in SOURCES.items()], [], size)

    def matmul(self, a: int, b: int, size: float, seconds: float) -> int:
        shares = [("R", "R", "R", 1), ("S0", "R", "S0", 8), ("R", "S1", "S1", 8), ("S1", "S0", "P", 8)]
        return self.op([((x, y), out, seconds / n) for x, y, out, n in shares], [a, b], size)

    def pointwise(self, ins: list[int], size: float, linear: bool = False) -> int:
        rules = [((layout,) * len(ins), layout, size / 1e12 / (1 if layout == "R" else 8)) for layout in LAYOUTS]
        if linear:
            rules.append((("P",) * len(ins), "P", size / 1e12))
        return self.op(rules, ins, size)

    def op(self, rules: list[tuple[tuple[str, ...], str, float]], ins: list[int], size: float) -> int:
        i = len(self.unary)
        costs: list[float] = []
        states: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = []
        for needs, out, seconds in rules:
            others = [layout for layout in LAYOUTS if layout != out]
            for extra in itertools.chain.from_iterable(itertools.combinations(others, k) for k in range(4)):
                states.append((needs, out, tuple(sorted((out, *extra)))))
                costs.append(seconds + sum(self.conversion(out, to, size) for to in extra))
        self.unary.append(np.array(costs))
        self.states.append(states)
        for slot, j in enumerate(ins):
            self.link(j, i, [state[0][slot] for state in states])
        return i

    def conversion(self, out: str, to: str, size: float) -> float:
        if out == "R":
            return 5e-6
        return 2e-5 + size / 4e10 * {"R": 1.75 if out == "P" else 0.9}.get(to, 0.9 if out == "P" else 0.12)

    def tie(self, out: int, source: int) -> None:
        self.link(out, source, [state[1] for state in self.states[source]])

    def link(self, producer: int, consumer: int, needs: list[str]) -> None:
        available = [state[2] for state in self.states[producer]]
        rows, columns = sorted(set(available)), sorted(set(needs))
        table = np.array([[0.0 if need in row else INF for need in columns] for row in rows])
        gu = np.array([rows.index(a) for a in available])
        self.edges.append(Edge(producer, consumer, gu, np.array([columns.index(n) for n in needs]), table))
