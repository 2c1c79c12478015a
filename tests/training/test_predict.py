"""Tests of answers for a user's own images, from a run and from its export, which JAX alone can read."""

import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from configs import digits
from hbf.config.datasets import get_config
from hbf.config.resolve import resolve
from hbf.data.augment.batches import normalize
from hbf.data.images.prepared import find, open_images, open_split
from hbf.errors import UserError
from hbf.models.build import abstract_params, build_model
from hbf.training.export import export, from_run, load_model, load_program, read_about, trained
from hbf.training.predict import Classifier, answer, find_images, of_export, of_trained, to_table
from hbf.training.workdir import read_predictions

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'how-to' / 'export.md'


def small(name, **changes):
  """Return a classifier with random parameters."""
  config = resolve(digits.get_config(f'model={name}')).model
  with config.unlocked():
    config.update_from_flattened_dict({'width': 16, 'depth': 1, 'heads': 2, **changes})
  rng = np.random.default_rng(0)
  shapes = abstract_params(build_model(config, 10), (8, 8, 1))
  params = jax.tree.map(lambda z: (0.5 * rng.normal(size=z.shape)).astype(z.dtype), shapes)
  about = {'task': 'classification', 'dataset': 'digits', 'classes': [*'abcdefghij'], 'image_shape': [8, 8, 1]}
  about |= {'mean': [0.3], 'std': [0.4], 'recipe': 'small', 'seed': 0, 'step': 3, 'average': False, 'schema': 7}
  return trained(about | {'model': config.to_dict()}, params)


def make_images(count, shape=(8, 8, 1)):
  return np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)


@pytest.fixture(scope='module')
def run(finished):
  return from_run(finished[0])


@pytest.fixture(scope='module')
def folder(run, tmp_path_factory):
  """Return the folder to which the model of `run` is exported."""
  path = tmp_path_factory.mktemp('exported') / 'model'
  export(run, path)
  return path


@pytest.fixture
def copied(folder, tmp_path):
  """Return a copy of the exported folder, to be damaged."""
  return pathlib.Path(shutil.copytree(folder, tmp_path / 'copied'))


@pytest.fixture
def own(tmp_path):
  """Return a folder of images of several kinds and sizes, with subfolders, a damaged image and hidden ones."""
  root = tmp_path / 'own'
  (root / 'more').mkdir(parents=True)
  (root / '.cache').mkdir()
  image = Image.fromarray(make_images(1, (8, 8))[0])
  for path in ('gray.png', '.hidden.png', '.cache/seen.png'):
    image.save(root / path)
  image.convert('RGBA').save(root / 'more' / 'rgba.png')
  image.convert('RGB').resize((1600, 1200)).save(root / 'big.jpg')
  (root / 'damaged.png').write_bytes((root / 'gray.png').read_bytes()[:50])
  return root


def test_answers_are_those_of_evaluation(finished, run, digits_dir, tmp_path):
  """The images of the test split, written to files, get the predictions of the run's own evaluation."""
  workdir, config, _ = finished
  source = open_split(open_images(find('digits', str(digits_dir))), 'test', None)
  paths = []
  for i in range(0, len(source), 3):
    paths.append(str(tmp_path / f'{i}.png'))
    Image.fromarray(source[i][0][..., 0]).save(paths[-1])
  found = [int(one.numbers[0][0]) for one in answer(of_trained(run), paths, top=1)]
  np.testing.assert_array_equal(found, read_predictions(workdir)['predictions'][::3])
  assert config.data.dir == str(digits_dir)


def test_neither_data_nor_tpus_need_be_there_and_the_average_is_another_model(finished, run, tmp_path):
  workdir = pathlib.Path(shutil.copytree(finished[0], tmp_path / 'run'))
  config = json.loads((workdir / 'config.json').read_text())
  config['data']['dir'] = str(tmp_path / 'gone')
  config['model']['stage2']['implementation'] = 'pallas'  # of a run on TPUs; elsewhere it is read with xla
  (workdir / 'config.json').write_text(json.dumps(config))
  moved, average = from_run(workdir), from_run(workdir, average=True)
  for name, param in run.params.items():
    np.testing.assert_array_equal(moved.params[name], param)
  assert average.about == run.about | {'average': True}
  assert any(np.any(average.params[name] != param) for name, param in run.params.items())


def test_files_come_from_folders_in_order_without_hidden_ones(own):
  named = [str(pathlib.Path(path).relative_to(own)) for path in find_images([str(own)])]
  assert named == ['big.jpg', 'damaged.png', 'gray.png', 'more/rgba.png']
  assert find_images(['b.png', str(own / 'more'), 'a.png']) == ['b.png', str(own / 'more' / 'rgba.png'), 'a.png']
  (own / 'empty').mkdir()
  with pytest.raises(UserError, match='empty has no files: expected images'):
    find_images([str(own / 'empty')])
  (own / 'more' / 'link').symlink_to(own / 'empty')
  with pytest.raises(UserError, match='more/link is a link to a folder: replace it by the folder'):
    find_images([str(own)])
  (own / 'more' / 'link').unlink()


def test_what_can_not_be_read_is_named_and_the_rest_answered(run, own):
  paths = find_images([str(own), 'nowhere.png'])
  asked, classifier = [], of_trained(run)

  def logits(images):
    asked.append(images)
    return classifier.logits(images)

  answers = [*answer(Classifier(run.about['classes'], (8, 8, 1), logits), paths, top=3, batch_size=2)]
  assert [one.image for one in answers] == paths
  assert [bool(one.error) for one in answers] == [False, True, False, False, True]
  assert all(one.image in one.error and '\n' not in one.error for one in answers if one.error)
  assert {batch.shape for batch in asked} == {(2, 8, 8, 1)}  # one program for all
  gray, rgba = answers[2], answers[3]
  assert gray.numbers == rgba.numbers and len(gray.numbers) == 3
  (every,) = (one.numbers for one in answer(classifier, [gray.image], top=99))
  assert [name for name, _ in every[:3]] == [name for name, _ in gray.numbers]
  probabilities = [probability for _, probability in every]
  assert len(every) == 10 and sum(probabilities) == pytest.approx(1) and probabilities == sorted(probabilities)[::-1]
  lines = to_table([gray, rgba]).splitlines()
  assert len(lines) == 4 and f'{gray.numbers[0][0]} {gray.numbers[0][1]:.1%}' in lines[2]


def test_outputs_that_are_not_finite_are_no_answer(own):
  paths = [str(own / 'gray.png'), str(own / 'more' / 'rgba.png')]
  classifier = Classifier(['a', 'b'], (8, 8, 1), lambda images: np.array([[0.0, 1.0], [np.nan, 0.0]]))
  good, bad = answer(classifier, paths, top=2)
  assert good.numbers and not good.error
  assert bad.error == f'{paths[1]}: the outputs of the model for this image are not finite: take another checkpoint'


def test_oblong_images_are_taken_as_they_are_stored(tmp_path):
  classifier = Classifier(['a', 'b'], (4, 6, 1), lambda images: np.zeros((len(images), 2)))
  for name, size in (('fits', (6, 4)), ('not', (4, 6))):
    Image.new('L', size).save(tmp_path / f'{name}.png')
  fits, other = answer(classifier, [str(tmp_path / 'fits.png'), str(tmp_path / 'not.png')], top=1)
  assert fits.numbers and not fits.error
  assert re.search('not.png has 4×6 pixels: expected 6×4', other.error)


@pytest.mark.parametrize(
  ('name', 'changes'), [('hyperbf', {'stage2.implementation': 'pallas'}), ('vit', {'pool': 'sequence'}), ('gmlp', {})]
)
def test_an_export_is_the_model_for_any_number_of_images(name, changes, tmp_path):
  model = small(name, **changes)
  if 'pool' in changes:  # older code had this parameter, which is dropped
    model = dataclasses.replace(model, params=model.params | {'pool/bias': jnp.ones(1)})
  export(model, tmp_path / 'model')
  program, images = load_program(tmp_path / 'model'), make_images(7)
  expected = jax.jit(model.logits)(model.params, images)
  assert np.abs(expected).max() > 0.1
  for count in (1, 3, 7):
    found = program(images[:count])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected[:count], atol=1e-5)
  module, variables, about = load_model(tmp_path / 'model')
  seen = normalize(images, about['mean'], about['std'])
  by_module = jax.jit(lambda variables, z: module.apply(variables, z, train=False))(variables, seen)
  np.testing.assert_allclose(by_module, expected, atol=1e-5)


def test_an_export_with_the_old_names_of_parameters_loads(tmp_path):
  model = small('hyperbf')
  export(model, tmp_path / 'model')
  path, about = tmp_path / 'model' / 'model.safetensors', read_about(tmp_path / 'model')
  old = {'centers': 'centres', 'log_sigma': 'log_width'}
  tensors = {'/'.join(old.get(part, part) for part in name.split('/')): z for name, z in load_file(path).items()}
  assert len(tensors.keys() - model.params.keys()) >= 2
  save_file(tensors, path, {'format': 'hbf classifier', 'version': '1'})
  about['sha256']['model.safetensors'] = hashlib.sha256(path.read_bytes()).hexdigest()
  (tmp_path / 'model' / 'config.json').write_text(json.dumps(about))
  _, variables, _ = load_model(tmp_path / 'model')
  found = flatten_dict(variables['params'], sep='/')
  assert found.keys() == model.params.keys()
  for name, value in model.params.items():
    np.testing.assert_array_equal(found[name], value)


def test_a_bfloat16_model_exports(tmp_path):
  model = small('hyperbf', dtype='bfloat16')
  export(model, tmp_path / 'model')
  expected = jax.jit(model.logits)(model.params, make_images(3))
  np.testing.assert_allclose(load_program(tmp_path / 'model')(make_images(3)), expected, atol=1e-5)


def test_an_export_says_what_it_is(finished, run, folder):
  about = read_about(folder)
  assert {key: about[key] for key in run.about} == json.loads(json.dumps(run.about))
  assert (finished[0] / 'checkpoints' / str(about['step'])).is_dir() and about['classes'] == [*'0123456789']
  assert sorted(path.name for path in folder.iterdir()) == ['config.json', 'model.safetensors', 'program.jax']
  assert [path.name for path in folder.parent.iterdir()] == ['model']
  with safe_open(folder / 'model.safetensors', 'numpy') as file:
    assert file.metadata() == {'format': 'hbf classifier', 'version': '1'} and set(file.keys()) == set(run.params)


def test_the_lines_of_the_page_need_jax_alone(run, folder, tmp_path):
  (lines,) = re.findall(r'```python\n(import jax\.export.*?)```', PAGE.read_text(), re.DOTALL)
  np.save(tmp_path / 'images.npy', make_images(3))
  before = f'import numpy\nimages = numpy.load({str(tmp_path / "images.npy")!r})\n'
  after = f'numpy.save({str(tmp_path / "out.npy")!r}, logits)\nimport sys\n'
  after += "assert not {'hbf', 'flax'} & sys.modules.keys()"
  (tmp_path / 'flowers-model').symlink_to(folder)
  subprocess.run([sys.executable, '-c', before + lines + after], cwd=tmp_path, check=True)
  expected = jax.jit(run.logits)(run.params, make_images(3))
  np.testing.assert_allclose(np.load(tmp_path / 'out.npy'), expected, atol=1e-5)


def test_an_export_writes_over_nothing(run, folder, tmp_path, monkeypatch):
  with pytest.raises(UserError, match='exists and is not an empty folder'):
    export(run, folder)
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match='exists and is not an empty folder'):
    export(run, tmp_path / 'file')
  (tmp_path / 'out').mkdir()  # empty
  before = sorted(tmp_path.iterdir())

  def full(path, value):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('hbf.training.export.write_json', full)  # when the other files are there
  monkeypatch.setattr('hbf.training.export._program', lambda _: jax.export.deserialize(program))
  program = bytearray((folder / 'program.jax').read_bytes())
  with pytest.raises(UserError, match=r'out could not be written .*No space left'):
    export(run, tmp_path / 'out')
  assert sorted(tmp_path.iterdir()) == before and not any((tmp_path / 'out').iterdir())


def change(folder, **values):
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
  ('damage', 'said'),
  [
    (lambda folder: change(folder, version=2), 'config.json is of version 2, this code reads version 1'),
    (lambda folder: change(folder, format='other'), 'config.json is not that of an exported model'),
    (lambda folder: (folder / 'config.json').unlink(), 'config.json is missing: expected'),
    (lambda folder: (folder / 'config.json').write_text('{"format": '), 'config.json is damaged'),
    (lambda folder: (folder / 'config.json').write_text('{"format": "hbf classifier", "version": 1}'), 'it lacks av'),
    (lambda folder: (folder / 'model.safetensors').unlink(), 'model.safetensors can not be read'),
    (
      lambda folder: (folder / 'model.safetensors').write_bytes(b'1' * 99),
      'model.safetensors is not what was exported',
    ),
  ],
)
def test_what_is_no_export_or_a_damaged_one_is_named(copied, damage, said):
  damage(copied)
  for load in (of_export, load_model):
    with pytest.raises(UserError, match=said):
      load(copied)


def test_a_config_that_does_not_fit_its_files_is_named(copied):
  about = read_about(copied)
  change(copied, classes=['a', 'b'])
  with pytest.raises(UserError, match=r'config\.json has other classes'):
    load_program(copied)
  change(copied, classes=about['classes'], model=about['model'] | {'width': 32})
  with pytest.raises(UserError, match=r'model\.safetensors does not hold the model that config\.json describes'):
    load_model(copied)
  change(copied, schema=99)
  with pytest.raises(UserError, match=r'config\.json: its config is of version 99'):
    load_model(copied)
  (copied / 'program.jax').write_bytes(b'')
  with pytest.raises(UserError, match=r'program\.jax is not what was exported'):
    load_program(copied)


def test_a_program_that_this_jax_can_not_read_is_named(copied):
  content = b'of another version'
  (copied / 'program.jax').write_bytes(content)
  change(copied, sha256=read_about(copied)['sha256'] | {'program.jax': hashlib.sha256(content).hexdigest()})
  with pytest.raises(UserError, match=rf'program\.jax can not be read by JAX {jax.__version__}'):
    load_program(copied)


@pytest.mark.parametrize(('of_text', 'said'), [(False, 'has no data.json'), (True, 'holds a run of task next_token')])
def test_what_is_no_run_of_a_classifier_is_refused(finished, tmp_path, of_text, said):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  with pytest.raises(UserError, match='is not the workdir of a run'):
    from_run(workdir)
  config = json.loads((finished[0] / 'config.json').read_text())
  if of_text:
    config = {'version': config['version'], **json.loads(resolve(get_config('text')).to_json())}
  (workdir / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=said):
    from_run(workdir)


def test_answers_bear_the_names_that_the_data_have_for_readers(finished, tmp_path):
  shutil.copytree(finished[0], tmp_path / 'run')
  path = tmp_path / 'run' / 'data.json'
  data = json.loads(path.read_text())
  path.write_text(json.dumps(data | {'names': {'3': 'three'}}))
  assert from_run(tmp_path / 'run').about['classes'] == ['three' if name == '3' else name for name in data['classes']]


def command(*arguments):
  return subprocess.run([sys.executable, '-m', 'hbf', 'predict', *arguments], capture_output=True, text=True)


def test_the_command_answers_from_an_export_in_json(folder, own, run):
  done = command(str(own), f'--model={folder}', '--json', '--top=2')
  assert done.returncode == 1 and done.stderr.count('\n') == 1 and 'damaged.png' in done.stderr
  found = {pathlib.Path(one.pop('image')).name: one for one in json.loads(done.stdout)}
  assert [*found] == ['big.jpg', 'damaged.png', 'gray.png', 'rgba.png']
  assert 'damaged.png' in found['damaged.png'].pop('error') and not found.pop('damaged.png')
  for path, said in found.items():
    (expected,) = answer(of_trained(run), [*map(str, own.rglob(path))], top=2)
    assert [one['class'] for one in said['classes']] == [name for name, _ in expected.numbers]
    assert [one['probability'] for one in said['classes']] == pytest.approx(
      [p for _, p in expected.numbers], abs=1e-5
    )


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    (['a.png'], 'error: give either the --workdir of a run or the --model of an exported folder'),
    (['--workdir=runs/none'], 'error: no images given: name files or folders after the flags'),
    (['--model=m', '--average', '--page=p.html', 'a.png'], 'error: not with --model: --page, --average. Give'),
    (['--workdir=runs/none', '--data_root=d', 'a.png'], 'error: --data_root needs --page: add it, or leave'),
    (['--workdir=runs/none', '--page=p.html', *['a.png'] * 101], 'error: a page takes 1 to 100 images, but 101 were'),
  ],
)
def test_a_wrong_command_ends_in_one_line(arguments, said):
  done = command(*arguments)
  assert (done.returncode, done.stdout, done.stderr.count('\n')) == (1, '', 1) and done.stderr.startswith(said)
