"""Many seeds in one item: hundreds of items take longer to collect and to report than to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def each_of(seeds: Iterable[int]) -> Callable[[Callable[[int], None]], Callable[[], None]]:
    """Makes a test of `seed` one of all `seeds`; where it fails, the traceback has the seed."""

    def of(test: Callable[[int], None]) -> Callable[[], None]:
        def of_all() -> None:
            for seed in seeds:
                test(seed)

        # Not by functools.wraps: pytest would look for a fixture `seed`.
        of_all.__name__, of_all.__doc__ = test.__name__, test.__doc__
        return of_all

    return of
