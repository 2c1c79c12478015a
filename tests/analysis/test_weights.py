"""Tests that the attention weights reproduce the output of the heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import random_params

from hbf.analysis.weights import attention_weights
from hbf.models.classifier import ImageClassifier
from hbf.models.embedding import PatchEmbedding
from hbf.nn.registry import make_stages, stage_options
from hbf.nn.trunk import Trunk

IMAGES = jax.random.normal(jax.random.key(0), (3, 8, 8, 1))
H, D, N = 2, 16, 17


def make(name, scan_layers=False, pool='cls', **options):
  first, second = stage_options(name, 12)
  trunk = Trunk(2, *make_stages(name, H, first | options, second), scan_layers=scan_layers)
  model = ImageClassifier(PatchEmbedding(D, 2, pool, 'learned'), trunk, 4)
  return model, random_params(model, IMAGES, train=False)


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('softmax+mlp', {'relative_positions': 'gaussian', 'qk_norm': True}),
    ('hyperbf+hyperbf', {'relative_positions': 'gaussian'}),
    ('hyperbf+mlp', {'kernel': 'inverse_multiquadric', 'memory': 5}),
    ('gated', {}),
    ('positional', {}),
    ('positional', {'pool': 'mean'}),
  ],
)
def test_values_times_weights_are_what_the_heads_make(name, options):
  model, params = make(name, **options)

  @jax.jit
  def values_and_outputs():
    seen = []

    def intercept(call, args, kwargs, context):
      out = call(*args, **kwargs)
      if context.method_name == '_over_tokens':
        seen.append((args[0 if name == 'positional' else 2], out))
      return out

    with nn.intercept_methods(intercept):
      model.apply({'params': params}, IMAGES, train=False)
    return seen

  weights = attention_weights(model, params, IMAGES)
  assert list(weights) == ['block0', 'block1']
  for i, (values, out) in enumerate(values_and_outputs()):
    w = np.asarray(weights[f'block{i}'], np.float64)
    count = N - (options.get('pool') == 'mean')
    assert w.shape == (3, H, count, count) and (w >= 0).all()
    made = np.einsum('bhij,bjhv->bihv', w, np.asarray(values, np.float64))
    if options.get('memory'):  # learned keys take a part of the weights and add their coefficients
      assert (w.sum(-1) < 1).all()
      learned = params[f'block{i}']['stage1']['memory_coefficients']
      rest = np.asarray(out, np.float64) - made
      share = 1 - w.sum(-1)
      assert (np.abs(rest) <= share.transpose(0, 2, 1)[..., None] * np.abs(learned).max() + 1e-5).all()
    else:
      np.testing.assert_allclose(w.sum(-1), 1, rtol=1e-5)
      np.testing.assert_allclose(made, out, rtol=1e-4, atol=1e-5)


def test_scanned_blocks_have_the_same_weights():
  model, params = make('hyperbf+hyperbf')
  scanned, _ = make('hyperbf+hyperbf', scan_layers=True)
  one, other = attention_weights(model, params, IMAGES), attention_weights(scanned, params, IMAGES)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, other)


def test_a_stage_without_attention_has_no_weights():
  assert attention_weights(*make('mixer'), IMAGES) == {}
  assert attention_weights(*make('linear'), jnp.asarray(IMAGES)) == {}
