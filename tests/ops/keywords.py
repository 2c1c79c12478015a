"""The operator, called with keywords in place of a `RadialBasis`."""

from hbf.ops import hyperbf as operator
from hbf.ops.basis import RadialBasis


def hyperbf(points, centers, coefficients, *, mask=None, causal=False, factors=None, implementation='xla', **basis):
  """Compute f by the fastest implementation."""
  how = {'mask': mask, 'causal': causal, 'factors': factors, 'implementation': implementation}
  return operator.hyperbf(points, centers, coefficients, RadialBasis(**basis), **how)


def hyperbf_plain(points, centers, coefficients, *, mask=None, **basis):
  """Compute f by its definition."""
  return operator.hyperbf_plain(points, centers, coefficients, RadialBasis(**basis), mask)


def log_responses(points, centers, **basis):
  """Compute log K."""
  return operator.nearness(points, centers, RadialBasis(**basis))
