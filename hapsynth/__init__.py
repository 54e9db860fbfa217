"""hapsynth: finds the distributed program for any JAX function on a cluster of heterogeneous devices.

What it offers is imported when it is first asked for, as `__init__.pyi` lists it: importing hapsynth takes no longer
than importing JAX.
"""

import importlib
import os

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

if "HAPSYNTH_LAUNCHER" in os.environ:
    # A process of `hapsynth launch` is one of its job from here on, not only from its first plan.
    importlib.import_module("hapsynth.rendezvous.meeting")
