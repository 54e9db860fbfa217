"""Dimension classes whose ratio changes along the program: `Resharding` is all that the planner asks for.

No other module knows of it (a contract in pyproject.toml): the rest of the search has programs with several ratios per
class, sizes of these, and collectives that move rows from one cut to another.
"""

from hapsynth.search.planning.resharding.search import Resharding as Resharding
