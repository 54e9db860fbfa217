"""hapsynth: finds the distributed program for any JAX function on a cluster of unlike devices."""

from hapsynth._version import __version__
from hapsynth.adapting.autotune import AutotuneResult, autotune, autotune_candidates
from hapsynth.adapting.monitor import Monitor
from hapsynth.adapting.rebalance import Proposal
from hapsynth.adapting.reshape import Buckets, ShapeError
from hapsynth.api import synthesize
from hapsynth.checkpoint import CheckpointError, load_state
from hapsynth.cluster.cluster import Cluster, ClusterError, ClusterWarning, DeviceKind, Link
from hapsynth.export import SourceError
from hapsynth.graph.trace import TraceError
from hapsynth.instructions.rules.extension import register_rule
from hapsynth.instructions.rules.notation import RuleError
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.instructions.testing.check_rule import RuleReport, check_rule
from hapsynth.lower import RecordedCall, UnsupportedError
from hapsynth.plan import CheckReport, Plan, PlanError, load
from hapsynth.running.base import OverlapWarning
from hapsynth.running.drift import DriftReport
from hapsynth.running.process_local_data import LocalSlices
from hapsynth.running.sharded_array import ShardedArray
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.several.plans import Plans, load_plans

__all__ = [
    "AutotuneResult",
    "Buckets",
    "CheckReport",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "ClusterWarning",
    "DeviceKind",
    "DriftReport",
    "InfeasibleError",
    "Link",
    "LocalSlices",
    "LoweringOptions",
    "Monitor",
    "OverlapWarning",
    "Plan",
    "PlanError",
    "Plans",
    "Proposal",
    "RecordedCall",
    "RuleError",
    "RuleReport",
    "ShapeError",
    "ShardedArray",
    "SourceError",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "autotune",
    "autotune_candidates",
    "check_rule",
    "load",
    "load_plans",
    "load_state",
    "register_rule",
    "synthesize",
]
