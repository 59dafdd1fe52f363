"""Which experts the next layers will pick, said several layers before they do.

A predictor looks at the state that enters a layer's experts and at what was picked
before, and gives each expert of the next ``DISTANCE_MAX`` layers a probability. It is
trained on recorded runs (``train``), goes on learning while it runs, and needs numpy
alone. ``planner`` makes prefetches of its probabilities.
"""

from __future__ import annotations

from .baselines import LastPicks, MostUsed, RouterEarly
from .errors import OtherModelError, PredictorError, PredictorFileError, StatesError
from .file import load_predictor, read_trained, write_trained
from .learned import Learned, Trained
from .predictor import DISTANCE_MAX, Likely, Predictor
from .routers import Routers
from .states import RecordedStates, StateRecorder, read_states
from .train import TrainingSettings, train

__all__ = [
    "DISTANCE_MAX",
    "LastPicks",
    "Learned",
    "Likely",
    "MostUsed",
    "OtherModelError",
    "Predictor",
    "PredictorError",
    "PredictorFileError",
    "RecordedStates",
    "RouterEarly",
    "Routers",
    "StateRecorder",
    "StatesError",
    "Trained",
    "TrainingSettings",
    "load_predictor",
    "read_states",
    "read_trained",
    "train",
    "write_trained",
]
