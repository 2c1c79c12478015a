"""The operator, called with keywords in place of a `RadialBasis`."""

from hbf.ops import hyperbf as operator
from hbf.ops.basis import RadialBasis


def hyperbf(points, centers, coefficients, *, mask=None, causal=False, factors=None, implementation='xla', **basis):
  """Compute the operator by the fastest implementation, with a basis from keywords."""
  how = {'mask': mask, 'causal': causal, 'factors': factors, 'implementation': implementation}
  return operator.hyperbf(points, centers, coefficients, RadialBasis(**basis), **how)


def hyperbf_plain(points, centers, coefficients, *, mask=None, **basis):
  """Compute the operator by its definition, with a basis from keywords."""
  return operator.hyperbf_plain(points, centers, coefficients, RadialBasis(**basis), mask)


def log_responses(points, centers, **basis):
  """Compute log K for points and centers, with a basis from keywords."""
  return operator.nearness(points, centers, RadialBasis(**basis))
