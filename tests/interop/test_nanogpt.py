"""Tests of nanoGPT's weights: our language model gives the logits of its GPT, computed in float64 text by text."""

import functools
import math
import pickle
import zipfile

import jax
import numpy as np
import pytest
from interop.others import attended_causally, gelu_exact, normed

from hbf.errors import UserError
from hbf.interop import nanogpt, pth, tensors

V, LENGTH, D, HEADS, DEPTH = 11, 7, 8, 2, 2


def random_tensors(bias=True, seed=0):
  """Return a state_dict as PyTorch 2 writes it: with the head beside the embedding, and without masks."""
  rng = np.random.default_rng(seed)
  shapes = {'transformer.wte.weight': (V, D), 'transformer.wpe.weight': (LENGTH, D), 'transformer.ln_f.weight': (D,)}
  for i in range(DEPTH):
    block = {'ln_1': (D,), 'attn.c_attn': (3 * D, D), 'attn.c_proj': (D, D), 'ln_2': (D,)}
    block |= {'mlp.c_fc': (4 * D, D), 'mlp.c_proj': (D, 4 * D)}
    shapes |= {f'transformer.h.{i}.{name}.weight': shape for name, shape in block.items()}
  if bias:
    layers = {name: shape for name, shape in shapes.items() if not name.endswith(('wte.weight', 'wpe.weight'))}
    shapes |= {f'{name.removesuffix("weight")}bias': shape[:1] for name, shape in layers.items()}
  theirs = {name: (0.5 * rng.normal(size=shape)).astype('f') for name, shape in shapes.items()}
  return theirs | {'lm_head.weight': theirs['transformer.wte.weight']}


def logits(t, text):
  """Return the logits [N, V] that nanoGPT's model.py computes at all positions of a text."""
  t = {name: np.asarray(tensor, np.float64) for name, tensor in t.items()}

  def linear(name, x):
    return x @ t[f'{name}.weight'].T + t.get(f'{name}.bias', 0.0)

  def norm(name, x):
    return normed(x, t[f'{name}.weight'], t.get(f'{name}.bias', 0.0), 1e-5)

  x = t['transformer.wte.weight'][text] + t['transformer.wpe.weight'][: len(text)]
  for i in range(DEPTH):
    b = f'transformer.h.{i}.'
    q, k, v = np.split(linear(f'{b}attn.c_attn', norm(f'{b}ln_1', x)), 3, axis=-1)
    heads = [slice(h * D // HEADS, (h + 1) * D // HEADS) for h in range(HEADS)]
    y = np.concatenate([attended_causally(q[:, z], k[:, z], v[:, z]) for z in heads], axis=-1)
    x = x + linear(f'{b}attn.c_proj', y)
    x = x + linear(f'{b}mlp.c_proj', gelu_exact(linear(f'{b}mlp.c_fc', norm(f'{b}ln_2', x))))
  return norm('transformer.ln_f', x) @ t['transformer.wte.weight'].T


def make_texts(length=LENGTH):
  return np.random.default_rng(1).integers(0, V, size=(2, length), dtype=np.int32)


def assert_its_logits(path, theirs, texts):
  model, variables = nanogpt.load(path, heads=HEADS)
  found = jax.jit(functools.partial(model.apply, train=False))(variables, texts)
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, [logits(theirs, text) for text in texts], rtol=0, atol=1e-4)


@pytest.mark.parametrize('length', [1, 4, LENGTH])
@pytest.mark.parametrize('bias', [True, False])
def test_its_logits(tmp_path, bias, length):
  theirs, path = random_tensors(bias), tmp_path / 'theirs.safetensors'
  tensors.write(path, theirs)
  assert_its_logits(path, theirs, make_texts(length))


def test_what_is_not_a_weight_is_left_out(tmp_path):
  """A file may have masks of older versions of PyTorch, and the names of a compiled model."""
  theirs, path = random_tensors(), tmp_path / 'theirs.npz'
  masks = {f'transformer.h.{i}.attn.bias': np.tri(LENGTH, dtype='f')[None, None] for i in range(DEPTH)}
  tensors.write(path, {f'_orig_mod.{name}': tensor for name, tensor in (theirs | masks).items()})
  assert_its_logits(path, theirs, make_texts())


def test_a_checkpoint_of_its_training_is_read_as_it_is(tmp_path):
  """nanoGPT's ckpt.pt holds {'model': the state_dict, 'iter_num': a number, and more}."""
  theirs, path = random_tensors(), tmp_path / 'ckpt.pt'
  tensors.write(path, theirs)
  with zipfile.ZipFile(path) as archive:
    parts = {name: archive.read(name) for name in archive.namelist()}
  inner = parts['archive/data.pkl'].removeprefix(pickle.PROTO + b'\x02').removesuffix(pickle.STOP)
  number = pth._text('iter_num') + pth._int(2000)
  parts['archive/data.pkl'] = b''.join([
    *(pickle.PROTO, b'\x02', pickle.EMPTY_DICT, pickle.MARK),
    *(pth._text('model'), inner, number, pickle.SETITEMS, pickle.STOP),
  ])  # fmt: skip
  with zipfile.ZipFile(path, 'w') as archive:
    for name, content in parts.items():
      archive.writestr(name, content)
  assert_its_logits(path, theirs, make_texts())


def without(name):
  return lambda theirs: {key: tensor for key, tensor in theirs.items() if key != name}


@pytest.mark.parametrize(('change', 'heads', 'message'), [
  (without('transformer.h.1.ln_2.weight'), HEADS, 'not hold nanoGPT.s GPT: missing: transformer.h.1.ln_2.weight'),
  (without('transformer.wte.weight'), HEADS, "lm_head.weight differs from its transformer.wte.weight"),
  (lambda t: t | {'lm_head.weight': t['lm_head.weight'] + 1}, HEADS, "lm_head.weight differs from its"),
  (lambda t: t | {'extra': np.zeros(2, 'f')}, HEADS, 'unknown: extra'),
  (lambda t: t, 3, 'a width of 8 is not divisible by 3 heads'),
  (lambda t: t, 0, 'a width of 8 is not divisible by 0 heads'),
  (lambda t: t, -2, 'a width of 8 is not divisible by -2 heads'),
])  # fmt: skip
def test_another_network_is_refused_with_what_does_not_fit(tmp_path, change, heads, message):
  path = tmp_path / 'theirs.npz'
  tensors.write(path, change(random_tensors()))
  with pytest.raises(UserError, match=f'theirs.npz: .*{message}'):
    nanogpt.load(path, heads=heads)


def test_its_loss_at_random_weights_is_that_of_guessing(tmp_path):
  """Weights near 0 give logits near 0, so all tokens are equally likely."""
  path = tmp_path / 'theirs.npz'
  tensors.write(path, {name: 0.01 * tensor for name, tensor in random_tensors().items()})
  model, variables = nanogpt.load(path, heads=HEADS)
  log_p = jax.nn.log_softmax(model.apply(variables, make_texts(), train=False))
  np.testing.assert_allclose(log_p, -math.log(V), atol=0.01)
