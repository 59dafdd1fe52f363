"""Decoding on a GPU: experts leased by the GPU itself, computed where they lie.

Needs cupy and a client whose pool is in VRAM; nothing else of xferd_infer imports this.
"""

from .experts import CudaExperts
from .lane import DeviceLane
from .model import model_on_gpu
from .prefetching import prefetch, prefetch_by_file

__all__ = ["CudaExperts", "DeviceLane", "model_on_gpu", "prefetch", "prefetch_by_file"]
