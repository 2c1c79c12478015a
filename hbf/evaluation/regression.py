"""Scores of the prediction of K values over every image of a split, in float64.

A target is one of the K quantities that have a value for each image.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hbf.evaluation.scores import MAE, R2, RMSE


def summarize(targets: np.ndarray, predictions: np.ndarray) -> dict[str, Any]:
  """Return the scores of a split.

  Args:
    targets: the true values, [n, K].
    predictions: the predicted values in the same units, [n, K].

  Returns:
    A dictionary. `n` is the number of images. The other keys are the scores `r2`, `rmse` and `mae`, each as the mean
    over the K targets; see `of_each`.
  """
  scores = of_each(targets, predictions)
  return {'n': len(targets)} | {name: float(values.mean()) for name, values in scores.items()}


def detail(targets: np.ndarray, predictions: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
  """Return the scores of each of the K targets.

  Args:
    targets: the true values, [n, K].
    predictions: the predicted values, [n, K].
    names: names of the targets, [K].

  Returns:
    A dictionary with the key `per_target`. It has a dictionary for each name, with the scores `r2`, `rmse` and `mae`.
  """
  scores = of_each(targets, predictions)
  return {
    'per_target': {
      name: {score: float(values[k]) for score, values in scores.items()} for k, name in enumerate(names)
    }
  }


def of_each(targets: np.ndarray, predictions: np.ndarray) -> dict[str, np.ndarray]:
  """Return the scores of each of the K targets, float64 [K], by name of the score.

  See `summarize` for the arguments.

  `rmse` is the root of the mean squared error, and `mae` is the mean absolute error. `r2` is 1 − E/V, where E is the
  mean squared error, and V is the variance of the true values. If V is 0, `r2` is 1 if E is 0, else 0.
  """
  error = predictions.astype(np.float64) - targets
  return {
    R2.name: determination_terms_of_each(targets, predictions).mean(axis=0),
    RMSE.name: np.sqrt(np.square(error).mean(axis=0)),
    MAE.name: np.abs(error).mean(axis=0),
  }


def determination_terms(targets: np.ndarray, predictions: np.ndarray) -> np.ndarray:
  """Return a number for each image, [n]. The mean of these numbers is the mean of R² over the targets."""
  return determination_terms_of_each(targets, predictions).mean(axis=1)


def determination_terms_of_each(targets: np.ndarray, predictions: np.ndarray) -> np.ndarray:
  """Return a number for each image and each target, [n, K]. The mean over the images is the target's R².

  For each target, the variance of the numbers, divided by n, estimates the variance of R² (the infinitesimal
  jackknife, Jaeckel 1972). For that, the number of an image is R² + n ∂R²/∂w at w = 1, where w is the weight of the
  image in R².
  """
  # R² is 1 − E/V, where E is the mean of the squared errors e², and V is the mean of the squared deviations d² of the
  # true values from their mean. So the number of an image is R² − (e² − d² E/V) / V.
  wide = targets.astype(np.float64)
  squares, deviations = np.square(predictions - wide), np.square(wide - wide.mean(axis=0))
  mean_square, variance = squares.mean(axis=0), deviations.mean(axis=0)
  constant = np.ptp(wide, axis=0) == 0  # the variance may differ from 0 by rounding
  divisor = np.where(constant, 1.0, variance)
  r2 = np.where(constant, mean_square == 0, 1 - mean_square / divisor)
  return np.where(constant, r2, r2 - (squares - deviations * mean_square / divisor) / divisor)
