"""hapsynth: finds the distributed program for any JAX function on a cluster of unlike devices."""

from hapsynth.api import synthesize
from hapsynth.checkpoint import CheckpointError, load_state
from hapsynth.cluster import Cluster, ClusterError, ClusterWarning, DeviceKind, Link
from hapsynth.contest import Fastest, contenders, fastest
from hapsynth.drift import DriftReport
from hapsynth.export import SourceError
from hapsynth.instructions.rule_check import RuleReport, check_rule
from hapsynth.instructions.rules.extension import register_rule
from hapsynth.instructions.rules.notation import RuleError
from hapsynth.local_data import LocalSlices
from hapsynth.lower import UnsupportedError
from hapsynth.monitor import Monitor
from hapsynth.plan import CheckReport, Plan, PlanError, load
from hapsynth.rebalance import Proposal
from hapsynth.search.planner import InfeasibleError
from hapsynth.several import Plans, load_plans
from hapsynth.shapes import Buckets, ShapeError
from hapsynth.sharded_array import ShardedArray
from hapsynth.trace import TraceError

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "CheckReport",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "ClusterWarning",
    "DeviceKind",
    "DriftReport",
    "Fastest",
    "InfeasibleError",
    "Link",
    "LocalSlices",
    "Monitor",
    "Plan",
    "PlanError",
    "Plans",
    "Proposal",
    "RuleError",
    "RuleReport",
    "ShapeError",
    "ShardedArray",
    "SourceError",
    "TraceError",
    "UnsupportedError",
    "check_rule",
    "contenders",
    "fastest",
    "load",
    "load_plans",
    "load_state",
    "register_rule",
    "synthesize",
]
