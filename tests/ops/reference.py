"""The operator as its equations say it: float64, one center at a time, sharing nothing with `hbf`."""

import numpy as np

KERNELS = {
  'gaussian': lambda s: np.exp(-s),
  'laplacian': lambda s: np.exp(-np.sqrt(2 * max(s, 0))),
  'rational_quadratic': lambda s: 1 / (1 + max(s, 0)),
  'inverse_multiquadric': lambda s: 1 / np.sqrt(1 + 2 * max(s, 0)),
}
# K itself of the depth b − s.
BALLS = {
  'ball_relu': lambda z: max(z, 0.0),
  'ball_relu2': lambda z: max(z, 0.0) ** 2,
  'ball_gelu': lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
  'ball_silu': lambda z: z / (1 + np.exp(-z)),
  'ball_softplus': lambda z: np.logaddexp(0, z),
  'ball_sigmoid': lambda z: 1 / (1 + np.exp(-z)),
}
# K itself of s.
VALUES = {
  'multiquadric': lambda s: np.sqrt(1 + 2 * s),
  'thin_plate': lambda s: s * np.log(s) if s > 0 else 0.0,
  'wendland': lambda s: max(1 - np.sqrt(s / 10), 0) ** 4 * (1 + 4 * np.sqrt(s / 10)),
}
METRICS = ('identity', 'diagonal', 'low_rank', 'full', 'bilinear')
NORMALIZATIONS = ('none', 'sum', 'rms', 'layer')


def squared_distance(x, t, metric, weights):
  """Return ‖W(x − t)‖² from the difference x − t, or xᵀMx + tᵀMt − 2xᵀMt for metric bilinear."""
  if metric == 'bilinear':
    return x @ weights @ x + t @ weights @ t - 2 * x @ weights @ t
  difference = x - t
  if metric == 'diagonal':
    difference = weights * difference
  if metric in ('low_rank', 'full'):
    difference = weights @ difference
  return difference @ difference


def squared_distances(points, centers, metric='identity', weights=None):
  """Return the squared distances [N, A] of points [N, D] and centers [A, D]."""
  points, centers, weights = (None if z is None else np.asarray(z, np.float64) for z in (points, centers, weights))
  return np.array([[squared_distance(x, t, metric, weights) for t in centers] for x in points])


def responses(points, centers, kernel, sigma, metric, weights, normalization, log_gain=0.0, mask=None):
  """Return the responses R_a(x) [N, A]."""
  r2 = squared_distances(points, centers, metric, weights)
  sigma, log_gain = (np.broadcast_to(np.asarray(z, np.float64), r2.shape) for z in (sigma, log_gain))
  mask = np.broadcast_to(True if mask is None else mask, r2.shape)
  result = np.zeros_like(r2)
  for n in range(len(r2)):
    present = [a for a in range(r2.shape[1]) if mask[n, a]]
    k = np.array([KERNELS[kernel](r2[n, a] / (2 * sigma[n, a] ** 2)) for a in present])
    gain = np.exp(log_gain[n, present]) if normalization == 'none' else 1.0
    result[n, present] = normalized(k * gain, normalization)
  return result


def normalized(k, normalization):
  """Return the responses [..., A] of the kernel values k [..., A]."""
  mean = k.mean(-1, keepdims=True)
  if normalization == 'sum':
    return k / k.sum(-1, keepdims=True)
  if normalization == 'rms':
    return k / np.sqrt(np.mean(k**2, -1, keepdims=True))
  if normalization == 'layer':
    return (k - mean) / np.sqrt(k.var(-1, keepdims=True) + 1e-6 * mean**2)
  return k


def hyperbf(points, centers, coefficients, **options):
  """Return f(x) = Σ_a R_a(x) c_a [N, V] for points [N, D], centers [A, D] and coefficients [A, V]."""
  return responses(points, centers, **options) @ np.asarray(coefficients, np.float64)


def metric_weights(rng, metric, d, rank, lead=()):
  """Return random float32 weights of a metric that changes norms little on average."""
  shapes = {'identity': None, 'diagonal': (d,), 'low_rank': (rank, d), 'full': (d, d), 'bilinear': (d, d)}
  if shapes[metric] is None:
    return None
  weights = rng.normal(size=(*lead, *shapes[metric])) * (1 if metric == 'diagonal' else d**-0.5)
  return weights.astype(np.float32)


def head(z, h):
  """Return the part of a parameter [H, ...] that belongs to head h, or None."""
  return None if z is None else np.asarray(z)[h]


def layer_norm(z, scale=1.0, bias=0.0):
  """Apply a LayerNorm over the last axis, with Flax's ε."""
  z = np.asarray(z, np.float64)
  return (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-6) * scale + bias


def norm_1(z):
  """Return the rows of z, divided by their norms."""
  z = np.asarray(z, np.float64)
  return z / np.linalg.norm(z, axis=-1, keepdims=True)


def softmax(z):
  """Apply a softmax over the last axis."""
  e = np.exp(z - z.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)
