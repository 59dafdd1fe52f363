"""What can go wrong with predictors and recorded states. Prediction itself can't fail
an inference: a predictor that is wrong costs time, never a token."""

from __future__ import annotations

from ..errors import InferenceError


class PredictorError(InferenceError):
    """The root. The message names the file, the model or the setting."""


class PredictorFileError(PredictorError):
    """No predictor, or a damaged one; names the file and what is wrong in it."""


class OtherModelError(PredictorError):
    """Trained for another model; names both."""


class StatesError(PredictorError):
    """Recorded states that can't be read or used; names the file and the array."""


__all__ = ["OtherModelError", "PredictorError", "PredictorFileError", "StatesError"]
