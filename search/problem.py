"""Weighted pairwise constraint problems and their exact solver: what the planner imports.

The types are in `_pairwise.py`, the pipeline in `_solve.py`.
"""

from hapsynth.search._pairwise import Edge, Ints, Problem, Progress, Resource, Solution, validate
from hapsynth.search._solve import solve, solve_tied
from hapsynth.search._warm import Messages

__all__ = ["Edge", "Ints", "Messages", "Problem", "Progress", "Resource", "Solution", "solve", "solve_tied", "validate"]
