"""Tests of the authors' weights: our models give their logits, and their code gives ours."""

import dataclasses
import functools
import itertools
import json
import types

import jax
import numpy as np
import pytest
from interop import published
from interop.checks import assert_logits

from configs import cifar10
from hbf.cli import convert as command
from hbf.config.resolve import resolve
from hbf.data.datasets import Dataset, load
from hbf.errors import Notice, UserError
from hbf.interop import authors, tensors
from hbf.interop.authors.positions import interpolate
from hbf.interop.authors.weights import needed_options
from hbf.models.build import build_model
from hbf.models.edited import EditedClassifier
from hbf.tasks.classification import Classification
from hbf.training.convert import of_authors, to_authors
from hbf.training.evaluate import evaluate_workdir

HEADS, SIDE = 3, 6
ONE = jax.devices()[:1]
OPTIONAL = ('attn.scale', 'mlp.M_RBF', 'mlp.fc.bias')
VERSIONS = [('hyperbf', optional) for n in range(4) for optional in itertools.combinations(OPTIONAL, n)]
NEWEST = [('hyperbf', OPTIONAL), ('vit', ())]  # ViT is the same in every version


pytestmark = pytest.mark.filterwarnings('ignore:unused tensors')


def make_images(rows=SIDE, columns=SIDE):
  return np.random.default_rng(1).normal(size=(2, rows, columns, 3)).astype(np.float32)


def write(path, state_dict):
  tensors.write(path, state_dict)
  return path


@pytest.mark.parametrize(('model', 'optional'), [*VERSIONS, ('vit', ())], ids=str)
def test_every_version_gives_its_logits(tmp_path, model, optional):
  state_dict = published.random_state_dict(model, optional)
  module, variables = authors.load(write(tmp_path / 'theirs.npz', state_dict))
  images = make_images()
  assert_logits(module, variables, images, published.logits(state_dict, images, HEADS))


@pytest.mark.parametrize('ending', tensors.READERS)
def test_every_kind_of_file_gives_the_same(tmp_path, ending):
  state_dict = published.random_state_dict('hyperbf', OPTIONAL)
  path = write(tmp_path / f'theirs{ending}', {f'module.{name}': z for name, z in state_dict.items()})
  module, variables = authors.load(str(path))
  images = make_images()
  assert_logits(module, variables, images, published.logits(state_dict, images, HEADS))


@pytest.mark.parametrize('scale', [-0.7, 0.0, 0.3])
def test_the_scale_may_have_any_sign(tmp_path, scale):
  state_dict = published.random_state_dict('hyperbf', OPTIONAL)
  state_dict['blocks.1.attn.scale'] = np.float32(scale)
  module, variables = authors.load(write(tmp_path / 'theirs.npz', state_dict))
  images = make_images()
  assert_logits(module, variables, images, published.logits(state_dict, images, HEADS))


@pytest.mark.parametrize('size', [(4, 4), (10, 10), (4, 8), (2, 18)], ids=str)
def test_positions_are_interpolated_to_images_of_another_size(tmp_path, size):
  state_dict = published.random_state_dict('vit')
  module, variables = authors.load(write(tmp_path / 'theirs.npz', state_dict))
  images = make_images(*size)
  assert_logits(module, variables, images, published.logits(state_dict, images, HEADS))


def test_interpolated_positions_are_those_of_pytorch():
  """The expected numbers are from PyTorch 2.13.

  Its call was interpolate(z.reshape(1, 1, 3, 3), scale_factor=(2.1 / 3, 4.1 / 3), mode='bicubic').
  """
  z = np.array([0, 1, 4, 2, -1, 0, 3, 5, -2], np.float32)
  expected = [0.3456, 0.1110, 1.3490, 3.4075, 2.7785, 3.2868, 1.4732, -1.7418]
  np.testing.assert_allclose(interpolate(z[:, None], 2, 4)[:, 0], expected, atol=1e-4)


@pytest.mark.parametrize(('model', 'optional'), NEWEST, ids=['hyperbf', 'vit'])
def test_the_model_is_one_that_a_config_can_say(model, optional):
  """The `model` part of the loaded network has the same keys as that of a shipped config."""
  config = authors.read(published.random_state_dict(model, optional)).config
  shipped = resolve(cifar10.get_config(f'model={model}')).model
  assert set(config) == set(shipped)
  for stage in ('stage1', 'stage2'):
    assert set(config[stage]) == set(shipped[stage])


def test_unused_tensors_are_named(tmp_path):
  path = write(tmp_path / 'theirs.npz', published.random_state_dict('vit'))
  with pytest.warns(UserWarning, match=r'unused tensors of .*theirs.npz: blocks\.0\.attn\.M, blocks\.1\.attn\.M'):
    authors.load(path)


def without(*endings):
  return lambda t: {name: z for name, z in t.items() if not name.endswith(endings)}


def replaced(name, shape):
  return lambda t: t | {name: np.zeros(shape, np.float32)}


@pytest.mark.parametrize(('model', 'change', 'messages'), [
  ('hyperbf', without('cls_token', '1.mlp.beta'), ['Hyper_ViT: missing: cls_token, blocks.1.mlp.beta']),
  ('hyperbf', without('0.mlp.M_RBF'), ['missing: blocks.0.mlp.M_RBF']),
  ('vit', without('0.mlp.fc1.bias'), ['authors\' ViT: missing: blocks.0.mlp.fc1.bias']),
  ('hyperbf', replaced('blocks.0.attn.gate', (3,)), ['unknown: blocks.0.attn.gate']),
  ('hyperbf', replaced('blocks.7.norm1.bias', (12,)), ['missing: blocks.2.norm1', 'unknown: blocks.7.norm1.bias']),
  ('hyperbf', replaced('head.bias', (5,)), ['wrong shape: head.bias (5,) instead of (4,)']),
  ('vit', replaced('blocks.1.attn.qkv.weight', (12, 12)), ['blocks.1.attn.qkv.weight (12, 12) instead of (36, 12)']),
  ('hyperbf', replaced('patch_embed.proj.weight', (12, 3, 2, 4)), ['instead of (12, 3, 2, 2)']),
  ('hyperbf', replaced('blocks.0.mlp.beta', (5, 1)), ['blocks.0.mlp.beta (5, 1) instead of (5,)']),
  ('hyperbf', lambda t: {'conv.weight': t['head.weight']}, ['missing: patch_embed.proj', 'unknown: conv.weight']),
  ('hyperbf', lambda t: {}, ['missing: patch_embed.proj.weight']),
  ('hyperbf', without(*(f'.{n}' for n in ('M', 'scale', 'beta', 'bias', 'weight', 'centers', 'M_RBF'))),
   ['missing']),
  ('hyperbf', replaced('pos_embed', (1, 9, 12)), ['positions of 8 patches']),
  ('hyperbf', lambda t: t | {f'blocks.{i}.attn.M': np.eye(5) for i in (0, 1)}, ['attn.M is 5×5', 'a width of 12']),
], ids=lambda z: z if isinstance(z, str) else '')  # fmt: skip
def test_a_state_dict_of_another_network_is_refused_with_what_is_wrong(tmp_path, model, change, messages):
  path = write(tmp_path / 'theirs.npz', change(published.random_state_dict(model, OPTIONAL)))
  with pytest.raises(UserError) as error:
    authors.load(path)
  for message in (str(path), *messages):
    assert message in str(error.value)


def test_heads_are_read_from_m_or_given(tmp_path):
  def heads(model, d, given=None, **sizes):
    return authors.read(published.random_state_dict(model, OPTIONAL, d=d, **sizes), given).config['heads']

  assert heads('hyperbf', 4) == heads('hyperbf', 4, 3) == heads('vit', 4) == 3
  assert heads('vit', 192) == heads('vit', 192, width=384) == 4  # the published constant says nothing
  assert heads('vit', 192, 6) == heads('vit', 4, 6) == 6
  for model, d, given in (('hyperbf', 4, 6), ('vit', 4, 5), ('vit', 4, 0), ('hyperbf', 0, None)):
    with pytest.raises(UserError, match=f'attn.M is {d}×{d}'):
      heads(model, d, given)


@pytest.mark.parametrize('ending', tensors.WRITERS)
@pytest.mark.parametrize(('model', 'optional'), NEWEST, ids=['hyperbf', 'vit'])
def test_what_is_read_and_written_again_is_the_same_network(tmp_path, model, optional, ending):
  state_dict = published.random_state_dict(model, optional)
  authors.save(tmp_path / f'back{ending}', *authors.load(write(tmp_path / 'theirs.npz', state_dict)))
  back = tensors.read(tmp_path / f'back{ending}')
  assert {name: z.shape for name, z in back.items()} == {name: z.shape for name, z in state_dict.items()}
  images = make_images()
  np.testing.assert_allclose(
    published.logits(back, images, HEADS), published.logits(state_dict, images, HEADS), rtol=0, atol=1e-4
  )


def test_what_an_older_version_lacks_is_left_out_if_it_does_nothing(tmp_path):
  state_dict = published.random_state_dict('hyperbf', ('attn.scale',))
  theirs = authors.load(write(tmp_path / 'theirs.npz', state_dict))
  authors.save(tmp_path / 'back.npz', *theirs, metric=False, bias=False)
  assert set(tensors.read(tmp_path / 'back.npz')) == set(state_dict)
  theirs = authors.load(write(tmp_path / 'theirs.npz', published.random_state_dict('hyperbf', OPTIONAL)))
  for name, leave in (('M_RBF', {'metric': False}), ('fc.bias', {'bias': False})):
    with pytest.raises(UserError, match=rf'blocks\.0\.mlp\.{name} changes the network'):
      authors.save(tmp_path / 'back.npz', *theirs, **leave)


def our_model(arguments='', **changes):
  config = resolve(cifar10.get_config(arguments)).model.unlock()
  config.update(width=12, depth=2, heads=3, patch=2, positions='learned', norm_epsilon=1e-5)
  if 'hidden' in config.stage2:
    config.stage2.hidden = 5
  else:
    config.stage1.update(sigma_per='layer')
    config.stage2.update(centers=5, normalization='none')
  config.update_from_flattened_dict(changes)
  return build_model(config, 4)


def random_params(model):
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), make_images(), train=False))['params']
  random = np.random.default_rng(0)
  return jax.tree.map(lambda z: (0.5 * random.normal(size=z.shape)).astype(np.float32), shapes)


@pytest.mark.parametrize('changes', [
  {'arguments': 'model=vit'},
  {},
  {'stage2.metric': 'identity', 'stage2.sigma_per': 'layer'},
  {'stage2.metric': 'full'},
  {'stage2.metric': 'low_rank', 'stage2.rank': 3},
  {'stage2.metric': 'bilinear', 'stage2.kernel': 'signed_gaussian'},
], ids=str)  # fmt: skip
def test_our_models_of_their_form_are_written(tmp_path, changes):
  model = our_model(**changes)
  params = random_params(model)
  authors.save(tmp_path / 'ours.safetensors', model, {'params': params})
  images = make_images()
  expected = published.logits(tensors.read(tmp_path / 'ours.safetensors'), images, HEADS)
  assert_logits(model, {'params': params}, images, expected)


@pytest.mark.parametrize(('changes', 'message'), [
  (
    {'pool': 'mean', 'norm_epsilon': 1e-6, 'stage2.normalization': 'layer', 'stage1.memory': 2},
    "model.pool 'cls', not 'mean', model.norm_epsilon 1e-05, not 1e-06, model.stage1.memory 0, not 2, "
    "model.stage2.normalization 'none', not 'layer'",
  ),
  ({'stage1.sigma_per': 'fixed'}, 'needs learned model.stage1.sigma_per'),
  ({'arguments': 'model=vit', 'stage2.activation': 'gelu'}, "needs model.stage2.activation 'relu', not 'gelu'"),
  ({'stage1.relative_positions': 'gaussian'}, "needs model.stage1.relative_positions 'none', not 'gaussian'"),
  (
    {'arguments': 'model=vit', 'stage1.relative_positions': 'gaussian'},
    "needs model.stage1.relative_positions 'none', not 'gaussian'",
  ),
  ({'stem': 'conv', 'width': 24}, "needs model.stem 'patch', not 'conv'"),
  ({'stage2.coefficients': 'linear'}, "needs model.stage2.coefficients 'constant', not 'linear'"),
  ({'arguments': 'model=vit', 'stage2.normalize': True}, 'needs model.stage2.normalize False, not True'),
  ({'stage1.sigma_per': 'head'}, "the sigmas of a layer's heads differ"),
  ({'stage1.metric': 'bilinear'}, "the metrics of a layer's heads differ"),
], ids=str)  # fmt: skip
def test_our_other_models_are_refused_with_what_stands_in_the_way(tmp_path, changes, message):
  model = our_model(**changes)
  with pytest.raises(UserError) as error:
    authors.save(tmp_path / 'ours.npz', model, {'params': random_params(model)})
  assert message in str(error.value)
  assert not (tmp_path / 'ours.npz').exists()


# Options that the authors' code has too, or that do not change the function of trained parameters.
HARMLESS = {
  'embed': 'width patch dropout dtype',
  'trunk': 'depth stage1 stage2 dropout drop_path dtype scan_layers remat',
  'stage1': 'heads metric rank sigma_per sigma_scale mimetic dtype',
  'stage2': """centers hidden metric rank sigma_per sigma_scale centers_init coefficients_scale output_scale radius
    nested implementation dtype""",
}


@pytest.mark.parametrize('name', ['hyperbf', 'vit'])
def test_every_option_of_a_model_is_needed_or_harmless(name):
  """An option that `save` forgets would write a network with another function."""
  model = our_model(f'model={name}')
  parts = {'embed': model.embed, 'trunk': model.trunk, 'stage1': model.trunk.stage1(), 'stage2': model.trunk.stage2()}
  for owner, part in parts.items():
    options = {field.name for field in dataclasses.fields(part)} - {'parent', 'name', *HARMLESS[owner].split()}
    assert {f'{owner}.{name}' for name in options} <= {*needed_options(parts['stage2'])}


def test_other_pairs_of_stages_and_other_shapes_are_refused(tmp_path):
  config = resolve(cifar10.get_config('model=softmax+hyperbf')).model
  with pytest.raises(UserError, match='no other pair of stages'):
    authors.save(tmp_path / 'ours.npz', build_model(config, 4), {'params': {'positions': np.zeros((4, 3))}})
  model = our_model()
  oblong = jax.tree.map(np.asarray, random_params(model)) | {'positions': np.zeros((8, 12))}
  with pytest.raises(UserError, match='a square of patches, and here are 8'):
    authors.save(tmp_path / 'ours.npz', model, {'params': oblong})
  edited = EditedClassifier(model, edits=1)
  with pytest.raises(UserError, match='type EditedClassifier; expected an ImageClassifier: load a run on images'):
    authors.save(tmp_path / 'ours.npz', edited, {'params': {}})


def for_digits(random_state_dict):
  """Return the tensors with a patch embedding for one channel, as the digits have."""
  return random_state_dict | {'patch_embed.proj.weight': random_state_dict['patch_embed.proj.weight'][:, :1]}


@pytest.fixture
def digits_config(tmp_path, digits_dir):
  path = tmp_path / 'config.py'
  path.write_text(
    'from configs import digits\n\n\ndef get_config(arguments=""):\n  config = digits.get_config(arguments)\n'
    f'  config.data.update(dir={str(digits_dir)!r}, mean=(0.5,), std=(0.25,))\n  config.train.average = 0.9\n'
    '  return config\n'
  )
  return str(path)


def test_a_workdir_is_made_that_is_evaluated_and_written_back(tmp_path, digits_config, digits_dir, capsys):
  state_dict = for_digits(published.random_state_dict('hyperbf', OPTIONAL, classes=10))  # positions of 3×3 patches
  theirs, workdir, ours = write(tmp_path / 'theirs.pth', state_dict), tmp_path / 'run', tmp_path / 'ours.npz'
  assert command.main([str(theirs), f'--workdir={workdir}', f'--config={digits_config}']) == 0
  assert 'Hyper_ViT: width 12, 2 blocks, 3 heads, stage2.centers 5, patch 2, 3×3 positions' in capsys.readouterr().out

  result = evaluate_workdir(workdir, 'latest', 'test', ONE).result
  assert (result['model'], result['recipe'], result['checkpoint']) == ('hyperbf', 'authors', 0)
  module, variables = authors.load(theirs)
  config = json.loads((workdir / 'config.json').read_text())
  source = load(name='digits', dir=str(digits_dir), root='', image_size=None, download=False).splits['test']
  images = (np.array([source[i][0] for i in range(len(source))], np.float32) / 255 - 0.5) / 0.25
  predictions = np.asarray(jax.jit(functools.partial(module.apply, train=False))(variables, images)).argmax(-1)
  assert result['correct'] == sum(predictions == [source[i][1] for i in range(len(source))])
  assert (config['data']['mean'], config['data']['std']) == ([0.5], [0.25])

  for flags in (['--export'], ['--export', '--average']):  # before the first step both are the same
    ours.unlink(missing_ok=True)
    assert command.main([str(ours), f'--workdir={workdir}', *flags]) == 0
    expected = published.logits(state_dict, images[:2], HEADS)
    np.testing.assert_allclose(published.logits(tensors.read(ours), images[:2], HEADS), expected, rtol=0, atol=1e-4)
  (workdir / 'edits.npz').touch()
  with pytest.warns(Notice, match='has edits, which are left out: the format has no edits'):
    assert command.main([str(ours), f'--workdir={workdir}', '--export']) == 0


def test_a_run_on_oblong_images_is_not_written(tmp_path, monkeypatch):
  """The number of patches is a square: 4×16 patches, which the authors' code would take for 8×8."""
  restored = types.SimpleNamespace(model=our_model(), task=types.SimpleNamespace(shape=(8, 32, 3)), params={})
  monkeypatch.setattr('hbf.training.convert.restore', lambda *arguments, **options: restored)
  with pytest.raises(UserError, match='images of 32×8 pixels; expected squares'):
    to_authors(tmp_path / 'ours.npz', tmp_path, 'latest', False)


class Images:
  """A few images in memory."""

  def __len__(self):
    return 64

  def __getitem__(self, index):
    return np.full((8, 8, 3), index, np.uint8), index % 4


@pytest.mark.parametrize(('name', 'given', 'mean'), [
  ('cifar10', (), 0.4914), ('cifar100', (), 0.4914), ('tiny_imagenet', (), 0.485), ('cifar10', (0.5, 0.5, 0.5), 0.5)
])  # fmt: skip
def test_images_are_normalized_as_theirs_were(tmp_path, monkeypatch, name, given, mean):
  dataset = Dataset(name, ('a', 'b', 'c', 'd'), (8, 8, 3), {'train': Images(), 'test': Images()})
  monkeypatch.setattr(Classification, 'load_dataset', lambda config: dataset)
  config = cifar10.get_config()
  config.data.update(name=name, mean=given, std=given)
  config.train.batch_size = 8
  theirs = write(tmp_path / 'theirs.npz', published.random_state_dict('vit'))
  assert '3 heads' in of_authors(theirs, tmp_path / 'run', config)
  data = json.loads((tmp_path / 'run' / 'config.json').read_text())['data']
  assert data['mean'][0] == mean and len(data['std']) == 3
  with pytest.raises(UserError, match='run exists'):
    of_authors(theirs, tmp_path / 'run', config)


def test_mistakes_of_the_command_end_in_one_line(tmp_path, digits_config, capsys):
  theirs = write(tmp_path / 'theirs.npz', published.random_state_dict('hyperbf', OPTIONAL))
  workdir = tmp_path / 'run'
  for arguments, message in (
    ([theirs, f'--config={digits_config}'], 'is for images of 3 channels and 4 classes, digits has 1 and 10'),
    ([theirs, '--config=configs/cifar11.py'], 'configs/cifar11.py is not there'),
    ([theirs, '--config=configs/cifar10.py:modl=vit'], "did you mean 'model'?"),
    ([tmp_path / 'none.pth', f'--config={digits_config}'], 'none.pth is not there'),
    ([theirs, '--config=text'], 'is for task next_token, and'),
    ([tmp_path / 'ours.npz', '--export'], 'is not the workdir of a run'),
  ):
    assert command.main([*map(str, arguments), f'--workdir={workdir}']) == 1
    said = capsys.readouterr().err
    assert message in said and said.count('\n') == 1
    assert not workdir.exists()
