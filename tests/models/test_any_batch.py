"""Tests that every model and stage has an exported program for any number of images, on every platform."""

import jax
import jax.export
import jax.numpy as jnp
import pytest
from sampled import sampled

from configs import digits
from hbf.config.resolve import resolve
from hbf.models.build import abstract_params, build_model
from hbf.nn.registry import MODELS

SHAPE = (8, 8, 1)
OPTIONS = [
  *((model, {}) for model in MODELS),
  ('hyperbf', {'stage2.normalization': 'none', 'stage1.qk_norm': True, 'stage2.normalize_inputs': True}),
  ('hyperbf', {'stage2.normalization': 'sum'}),
  ('hyperbf', {'stage2.centers_init': 'kmeans', 'stage2.nested': True, 'stage1.kernel': 'laplacian'}),
  ('hyperbf', {'stage1.relative_positions': 'gaussian', 'pool': 'cls', 'scan_layers': True, 'remat': True}),
  ('positional', {'pool': 'mean', 'patch': 1, 'window': 4, 'depth': 2}),
  ('vit', {'stage1.relative_positions': 'rotary', 'pool': 'sequence', 'stem': 'conv', 'whiten': True, 'patch': 4}),
]


def exported(name, **changes):
  """Return the exported program of a small model, for all platforms."""
  config = resolve(digits.get_config(f'model={name}')).model
  with config.unlocked():
    config.update_from_flattened_dict({'width': 16, 'depth': 1, 'heads': 2, **changes})
  model = build_model(config, 10)

  def program(params, images):
    return model.apply({'params': params}, images, train=False)

  images = jax.ShapeDtypeStruct(jax.export.symbolic_shape('b, 8, 8, 1'), jnp.float32)
  platforms = ('cpu', 'cuda', 'tpu')
  return jax.export.export(jax.jit(program), platforms=platforms)(abstract_params(model, SHAPE), images)


@pytest.mark.parametrize(('name', 'changes'), sampled(OPTIONS))
def test_every_model_has_a_program_for_any_number_of_images(name, changes):
  (logits,) = exported(name, **changes).out_avals
  assert jax.export.is_symbolic_dim(logits.shape[0]) and logits.shape[1] == 10


@pytest.mark.parametrize('name', ['hyperbf', 'vit', 'amlp'])
def test_such_a_program_has_no_kernel_of_cudnn(name, monkeypatch):
  """A kernel of cuDNN is for one batch size, and JAX doesn't export its call. So it is left out on GPUs too."""
  seen, attention = [], jax.nn.dot_product_attention

  def standing_in(*arrays, implementation=None, **options):
    if implementation == 'cudnn':
      seen.append(arrays[0].shape[0])
    return attention(*arrays, **options)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', standing_in)
  exported(name, dtype='bfloat16')
  assert {batch for batch in seen if jax.export.is_symbolic_dim(batch)} == set()
