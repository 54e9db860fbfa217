"""The program of the least makespan, where communication overlaps computation: the search for it and its last order."""

from hapsynth.search.planning.makespan.conclusion import concluded as concluded
from hapsynth.search.planning.makespan.conclusion import first_look as first_look
from hapsynth.search.planning.makespan.final_schedule import MOST_GAINED as MOST_GAINED
from hapsynth.search.planning.makespan.final_schedule import Overlapped as Overlapped
from hapsynth.search.planning.makespan.final_schedule import as_it_is as as_it_is
from hapsynth.search.planning.makespan.final_schedule import final_makespan_s as final_makespan_s
from hapsynth.search.planning.makespan.search import TOLERANCE as TOLERANCE
from hapsynth.search.planning.makespan.search import MakespanSearch as MakespanSearch
from hapsynth.search.planning.makespan.search import Scheduled as Scheduled
