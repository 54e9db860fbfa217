"""Plans compiled for GPUs that are not there: XLA's CUDA compiler takes a description of a card for one."""

from hapsynth.targets.compiled_target import CompiledTarget, collectives_differ
from hapsynth.targets.compiling import compile_for
from hapsynth.targets.cuda_plugin import TargetError

__all__ = ["CompiledTarget", "TargetError", "collectives_differ", "compile_for"]
