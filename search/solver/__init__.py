"""Weighted pairwise constraint problems and their exact solver: what the planner imports.

The types are in `_pairwise.py`, the pipeline in `_solve.py`.
"""

from hapsynth.search.solver.problem import Edge, Ints, Problem, Progress, Resource, Solution, validate
from hapsynth.search.solver.solve import solve, solve_quotient
from hapsynth.search.solver.warm_start import Messages

__all__ = [
    "Edge",
    "Ints",
    "Messages",
    "Problem",
    "Progress",
    "Resource",
    "Solution",
    "solve",
    "solve_quotient",
    "validate",
]
