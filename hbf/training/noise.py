"""The gradient noise scale: the batch size at which noise and signal of the gradient are about equally large.

References: McCandlish et al. 2018, "An empirical model of large-batch training", arXiv:1812.06162, appendix A.1.
"""

from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.training.state import GradientNorms


def check_noise_scale(config: ConfigDict) -> None:
  """Raise UserError if the config asks for the noise scale, but `train.accumulate` does not split batches."""
  if config.log.noise_scale and config.train.accumulate < 2:
    raise UserError(
      'log.noise_scale compares the gradient of a batch with the gradients of its parts, and train.accumulate is '
      f'{config.train.accumulate}: set train.accumulate to 2 or more, or log.noise_scale to False'
    )


def noise_scale(norms: GradientNorms, batch_size: int, parts: int) -> dict[str, float]:
  """Estimate the gradient noise scale from the squared norms of the gradients of batches and of their parts.

  Let G be the gradient of the expected loss, and Σ the covariance of the gradient of one example. The mean gradient
  of b independent examples has the expected squared norm |G|² + tr Σ / b. The whole batch and its parts have two
  values of b, so there are two equations for the two unknowns |G|² and tr Σ. Their solutions are unbiased estimates.

  Args:
    norms: the squared norms, averaged over some steps.
    batch_size: the number of examples in a batch.
    parts: the number of parts of a batch, at least 2.

  Returns:
    `gradient_squared`, the estimate of |G|², which may be negative; `gradient_variance`, the estimate of tr Σ; and
    `noise_scale`, which is tr Σ / |G|² in examples. `noise_scale` is missing if the estimate of |G|² is not positive.
  """
  small, big = float(norms.small), float(norms.big)
  squared = (parts * big - small) / (parts - 1)
  variance = (small - big) * batch_size / (parts - 1)
  found = {'gradient_squared': squared, 'gradient_variance': variance}
  return found | ({'noise_scale': variance / squared} if squared > 0 else {})
