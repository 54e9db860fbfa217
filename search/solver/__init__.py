"""Weighted pairwise constraint problems and their exact solver: what the planner imports.

The types are in `problem.py`, the pipeline in `solve.py`, what it weighs its steps by in `options.py`.
"""

from hapsynth.search.solver.options import SolverOptions
from hapsynth.search.solver.problem import Edge, Ints, Messages, Problem, Resource, Solution, SolverProgress, validate
from hapsynth.search.solver.solve import solve, solve_quotient

__all__ = [
    "Edge",
    "Ints",
    "Messages",
    "Problem",
    "Resource",
    "Solution",
    "SolverOptions",
    "SolverProgress",
    "solve",
    "solve_quotient",
    "validate",
]
