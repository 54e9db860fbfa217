"""What the solver weighs its steps by: rounds, limits and tolerances, none of which changes what is optimal."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SolverOptions:
    """Defaults were tried on the planner's problems: training steps of a hundred to ten thousand ops."""

    # `solve`
    quotient_nodes: int = 2000
    """Of a search that proves nothing."""

    # Primal and dual
    searches: tuple[int, ...] = (2000, 20_000, 10**9)
    """Nodes of A*: tried in turn, the next when one no longer helps."""
    dive_nodes: int = 3
    """Per variable, where the heuristic leads straight to an optimum or soon nowhere."""
    worthwhile: float = 0.1
    """Fraction of the gap: a round that closes more is repeated before anything dearer is tried."""
    shrunk: float = 0.5
    """If pruning would leave less than this fraction of the states, they are pruned first."""
    droppable: int = 5000
    """With fewer states sweeps cost less than dropping some."""
    elimination_cells: float = 2.0**26
    """Table entries of an elimination: a second."""

    # The dual's ascent
    sweeps: int = 5
    """Between two attempts to decode an assignment."""
    most_sweeps: int = 300
    stalled: float = 5e-4
    """Relative rise of the bound in ten sweeps."""
    many_states: int = 60
    """Per variable: with more, A* goes among those of least floor after `first_sweeps`."""
    first_sweeps: int = 40
    close: float = 0.01
    """Relative gap; with a greater one a better assignment helps more than sweeps."""
    loose: float = 5e-3
    """Relative gap; with a greater one the linear relaxation is solved before A* searches all that is left."""
    relaxed_cells: int = 200_000
    """Table entries of the largest network for which it is: some seconds."""
    stretch: int = 50
    """Nodes; about what a layer of a transformer has."""
    entries_per_level: int = 4000
    """Below this an array operation's fixed cost dominates."""
    large_table: int = 1000
    """Entries; larger tables are not copied for each edge."""

    # Reduction
    joined_entries: int = 300_000
    """Of the table that eliminating one variable may create."""
    joining_work: int = 40_000_000
    """Additions that one elimination may cost."""
    cheap_work: int = 50_000
    """The same of one that is not worth a look for dominated states first."""
    rivals: int = 16
    """States are tried for dominance only against this many of the cheapest."""
    compared_entries: int = 100_000
    """Subtractions; for tables that take more, only the rows asked for are compared."""

    # Alike variables as one
    quotient_worthwhile: float = 0.5
    """Of the variables: with more colours than that nothing is won."""
    near_rounds: int = 1
    """Of colouring where only an assignment is wanted."""
    far_rounds: int = 3
    """The same where messages are: BERT-base on 2x4 takes 90, 60, 50 and 80 sweeps from 1, 2, 3 and 6 rounds' ties."""
    quotient_sweeps: int = 40

    # Prices of resources
    price_rounds: int = 16
    mixed: int = 4
    """Of the assignments seen last: mixtures of so many are tried."""
    price_tolerance: float = 1e-4
    """Relative, of each round's bound."""
    patch_gap: float = 1e-5
    """Relative; of the knapsack over patches."""
    patch_nodes: int = 10_000
    descent_rounds: int = 10
    """Of one variable after another, from a start within limits."""


DEFAULT = SolverOptions()
