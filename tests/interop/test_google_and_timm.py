"""Tests of Google's and timm's weights: our models give the logits of their networks."""

import jax
import numpy as np
import pytest
from interop import others, published
from interop.checks import assert_logits

from configs import cifar10
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.interop import google, origins, tensors, timm
from hbf.interop.network import to_module
from hbf.interop.positions import resize

NETWORKS = {
  'vit.google': others.google_vit,
  'vit by kind.google': others.google_vit_by_kind,
  'mixer.google': others.google_mixer,
  'vit.timm': others.timm_vit,
  'gmlp.timm': others.timm_gmlp,
  'mixer.timm': others.timm_mixer,
}
VITS = [others.google_vit, others.timm_vit]


def make_images(rows=others.SIDE, columns=others.SIDE):
  return np.random.default_rng(1).normal(size=(2, rows, columns, 3)).astype(np.float32)


def load(network, path):
  if network.__name__.startswith('google'):
    return google.load(path)
  return timm.load(path, heads=others.HEADS)


def write(path, theirs):
  tensors.write(path, theirs)
  return path


@pytest.mark.parametrize('network', NETWORKS.values(), ids=NETWORKS)
def test_their_logits(tmp_path, network):
  theirs, images = others.random_tensors(network), make_images()
  module, variables = load(network, write(tmp_path / 'theirs.npz', theirs))
  assert_logits(module, variables, images, others.logits(network, theirs, images))


def test_a_vit_without_a_class_token_reads_the_mean(tmp_path):
  theirs, images = others.random_tensors(others.google_vit), make_images()
  del theirs['cls']
  theirs['Transformer/posembed_input/pos_embedding'] = theirs['Transformer/posembed_input/pos_embedding'][:, 1:]
  module, variables = google.load(write(tmp_path / 'theirs.npz', theirs))
  assert_logits(module, variables, images, others.logits(others.google_vit, theirs, images))


@pytest.mark.parametrize('ending', tensors.READERS)
@pytest.mark.parametrize('network', [others.google_mixer, others.timm_gmlp], ids=['google', 'timm'])
def test_every_kind_of_file_gives_the_same(tmp_path, network, ending):
  theirs = others.random_tensors(network)
  if network is others.timm_gmlp:  # trained on several devices
    theirs = {f'module.{name}': tensor for name, tensor in theirs.items()}
  _, found = load(network, str(write(tmp_path / f'theirs{ending}', theirs)))
  _, expected = load(network, write(tmp_path / 'other.npz', others.random_tensors(network)))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize('size', [(8, 8), (20, 16)], ids=str)
@pytest.mark.parametrize('network', VITS, ids=['google', 'timm'])
def test_positions_of_a_vit_are_resized_to_images_of_another_size(tmp_path, network, size):
  theirs, images = others.random_tensors(network), make_images(*size)
  module, variables = load(network, write(tmp_path / 'theirs.npz', theirs))
  assert_logits(module, variables, images, others.logits(network, theirs, images))


def test_resized_positions_are_those_of_pytorch():
  """The expected numbers are from PyTorch 2.15. timm makes the same call.

  The call is interpolate(z.reshape(1, 1, 3, 3), (2, 4), mode='bicubic', antialias=True).
  """
  z = np.array([0, 1, 4, 2, -1, 0, 3, 5, -2], np.float32)
  expected = [0.6911, 0.0996, 0.9956, 2.8175, 2.7256, 3.0870, 1.2287, -1.6843]
  np.testing.assert_allclose(resize(z[:, None], 2, 4)[:, 0], expected, atol=1e-4)


@pytest.mark.parametrize('network', [others.google_mixer, others.timm_gmlp, others.timm_mixer])
def test_networks_with_weights_for_each_token_take_images_of_one_size(tmp_path, network):
  module, variables = load(network, write(tmp_path / 'theirs.npz', others.random_tensors(network)))
  with pytest.raises(UserError, match='has parameters for 9 tokens, and here are 6'):
    module.apply(variables, make_images(8, 12), train=False)


@pytest.mark.parametrize('network', NETWORKS.values(), ids=NETWORKS)
def test_the_model_is_one_that_a_config_can_say(network):
  """The `model` part of the loaded network has the same keys as that of a shipped config."""
  read = google.read if network.__name__.startswith('google') else timm.read
  config = read(others.random_tensors(network)).config
  shipped = resolve(cifar10.get_config(f'model={config["name"]}')).model
  assert set(config) == set(shipped)
  for stage in ('stage1', 'stage2'):
    assert set(config[stage]) == set(shipped[stage])


def test_heads_of_timm_follow_from_the_width_or_are_given(tmp_path):
  def heads(width, given=None):
    return timm.read(others.random_tensors(others.timm_vit, width=width), given).config['heads']

  assert (heads(192), heads(1152), heads(1280), heads(32)) == (3, 16, 16, 1)
  assert heads(192, 6) == 6
  for given in (0, 5):
    with pytest.raises(UserError, match=f'its width of 16 is not divisible by {given} heads'):
      heads(16, given)


@pytest.mark.parametrize(('theirs', 'origin'), [
  (others.random_tensors(others.google_vit), "Google's ViT"),
  (others.random_tensors(others.google_mixer), "Google's Mixer"),
  (others.random_tensors(others.timm_vit), "timm's ViT"),
  (others.random_tensors(others.timm_gmlp), "timm's gMLP"),
  (others.random_tensors(others.timm_mixer), "timm's Mixer"),
  (published.random_state_dict('hyperbf', ('attn.scale',)), "the authors' Hyper_ViT"),
  (published.random_state_dict('vit'), "the authors' ViT"),
], ids=lambda z: z if isinstance(z, str) else '')  # fmt: skip
def test_names_of_tensors_tell_whose_they_are(tmp_path, theirs, origin):
  network = origins.read(write(tmp_path / 'theirs.npz', theirs))
  assert network.origin == origin
  _, variables = to_module(network)
  assert jax.tree.leaves(variables)[0].dtype == np.float32


def without(*endings):
  return lambda t: {name: z for name, z in t.items() if not name.endswith(endings)}


def replaced(name, shape):
  return lambda t: t | {name: np.zeros(shape, np.float32)}


IN_BLOCK = 'Transformer/encoderblock_1'


@pytest.mark.parametrize(('network', 'change', 'messages'), [
  (others.google_vit, without('1/LayerNorm_2/bias'), [f"Google's ViT: missing: {IN_BLOCK}/LayerNorm_2/bias"]),
  (others.google_vit, replaced('extra', (3,)), ['unknown: extra']),
  (others.google_vit, replaced('head/kernel', (16, 7)), ['wrong shape: head/bias (5,) instead of (7,)']),
  (others.google_vit, replaced('head/bias', (16, 7)), ['wrong shape: head/bias (16, 7) instead of (5,)']),
  (others.google_vit, replaced('pre_logits/kernel', (16, 16)), ['pre_logits', 'one that was fine-tuned']),
  (others.google_vit, replaced('conv_root/kernel', (7, 7, 3, 64)), ['unknown: conv_root/kernel']),
  (others.google_vit, without('embedding/kernel', 'cls'), ['missing: embedding/kernel']),
  (others.google_vit, lambda t: {name: z for name, z in t.items() if 'block' not in name}, ['it has no blocks']),
  (others.google_vit, replaced('Transformer/posembed_input/pos_embedding', (1, 9, 16)), ['of 8 patches']),
  (others.google_vit, lambda t: {}, ["it does not hold Google's ViT: missing: embedding/kernel"]),
  (others.google_mixer, without('1/token_mixing/Dense_0/bias'), ["Mixer: missing: MixerBlock_1/token_mixing/De"]),
  (others.google_mixer, replaced('MixerBlock_0/token_mixing/Dense_1/bias', (8,)), ['/bias (8,) instead of (9,)']),
  (others.timm_vit, without('0.attn.qkv.bias'), ["timm's ViT: missing: blocks.0.attn.qkv.bias"]),
  (others.timm_vit, replaced('blocks.1.ls1.gamma', (16,)), ['unknown: blocks.1.ls1.gamma']),
  (others.timm_vit, replaced('blocks.1.attn.qkv.weight', (16, 16)), ['weight (16, 16) instead of (48, 16)']),
  (others.timm_vit, replaced('blocks.4.norm1.bias', (16,)), ['missing: blocks.2.norm1', 'unknown: blocks.4.nor']),
  (others.timm_vit, replaced('pos_embed', (1, 9, 16)), ['of 8 patches, which do not form a square']),
  (others.timm_gmlp, replaced('blocks.0.mlp_channels.fc1.bias', (12,)), ['fc1.bias (12,) instead of (24,)']),
  (others.timm_gmlp, replaced('blocks.0.mlp_channels.gate.proj.weight', (9, 8)), ['(9, 8) instead of (9, 9)']),
  (others.timm_mixer, without('head.bias', 'norm.bias'), ["timm's Mixer: missing: norm.bias, head.bias"]),
  (others.timm_mixer, replaced('stem.proj.weight', (16, 3, 4, 2)), ['(16, 3, 4, 2) instead of (16, 3, 4, 4)']),
], ids=lambda z: getattr(z, '__name__', ''))  # fmt: skip
def test_what_does_not_fit_is_listed(tmp_path, network, change, messages):
  path = write(tmp_path / 'theirs.npz', change(others.random_tensors(network)))
  with pytest.raises(UserError) as error:
    load(network, path)
  for message in (str(path), *messages):
    assert message in str(error.value)


@pytest.mark.parametrize(('network', 'theirs'), [
  (others.google_vit, others.random_tensors(others.timm_vit)),
  (others.google_vit, published.random_state_dict('vit')),
  (others.timm_vit, others.random_tensors(others.google_mixer)),
  (others.timm_vit, published.random_state_dict('vit')),
  (others.timm_vit, others.random_tensors(others.timm_gmlp) | {'blocks.0.mlp_tokens.fc1.bias': np.zeros(3)}),
], ids=['timm', 'authors', 'google', 'authors', 'both'])  # fmt: skip
def test_files_of_another_code_are_refused(tmp_path, network, theirs):
  path = write(tmp_path / 'theirs.npz', theirs)
  with pytest.raises(UserError, match=r'it does not hold .*: missing: .*; unknown: '):
    load(network, path)


def test_heads_of_google_make_up_the_width(tmp_path):
  theirs = others.random_tensors(others.google_vit)
  for i in range(others.DEPTH):
    for name in ('query', 'key', 'value', 'out'):
      key = f'Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/{name}/kernel'
      theirs[key] = theirs[key][:, :, :4] if name != 'out' else theirs[key][:, :4]
      bias = key.replace('kernel', 'bias')
      theirs[bias] = theirs[bias][:, :4] if name != 'out' else theirs[bias]
  with pytest.raises(UserError, match='its width of 16 is not 2 heads of 4 dimensions'):
    google.load(write(tmp_path / 'theirs.npz', theirs))
