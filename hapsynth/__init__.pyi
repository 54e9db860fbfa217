"""What `import hapsynth` offers; `__init__.py` reads it here."""

from . import checkpoint, jobs, targets
from ._version import __version__
from .adapting.autotune import AutotuneResult, autotune, autotune_candidates
from .adapting.monitor import Monitor
from .adapting.rebalance import Proposal
from .adapting.reshape import Buckets, ShapeError
from .api import synthesize
from .checkpoint import CheckpointError, load_state
from .cluster.cluster import Cluster, ClusterError, ClusterWarning, DeviceKind, Link
from .export import SourceError
from .graph.trace import TraceError
from .instructions.rules.extension import register_rule
from .instructions.rules.notation import RuleError
from .instructions.staging.options import LoweringOptions
from .instructions.testing.check_rule import RuleReport, check_rule
from .lower import RecordedCall, UnsupportedError
from .plan import CheckReport, Plan, PlanError, load
from .report.explain import explain
from .running.base import OverlapWarning
from .running.drift import DriftReport
from .running.process_local_data import LocalSlices
from .running.sharded_array import ShardedArray
from .search.planning.planner import InfeasibleError
from .several.plans import Plans, StateWarning, load_plans, synthesize_several
from .view.sharding_picture import visualize_sharding

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
    "StateWarning",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "autotune",
    "autotune_candidates",
    "check_rule",
    "checkpoint",
    "explain",
    "jobs",
    "load",
    "load_plans",
    "load_state",
    "register_rule",
    "synthesize",
    "synthesize_several",
    "targets",
    "visualize_sharding",
]
