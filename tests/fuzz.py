"""Files that are damaged in every way Hypothesis thinks of, read by the functions that read files of others.

`make fuzz` runs all. `python -m tests.fuzz --examples=300 --only=edits` runs a part. A reader must return a value of
the right kind, or raise UserError. It must not need much memory: the address space is limited. A failure that is
found becomes a test of its own, beside the tests of the reader.
"""

import argparse
import dataclasses
import io
import json
import logging
import os
import pathlib
import resource
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import hypothesis
import jax
import numpy as np
from hypothesis import strategies as st
from PIL import Image

from configs import digits
from hbf.comparison.grid import Grid
from hbf.comparison.stored import PackedRuns
from hbf.comparison.tune import load_trials
from hbf.config.resolve import resolve
from hbf.data.images.codec import check_file, decode_file
from hbf.data.images.files import file_sha256
from hbf.data.images.prepare import prepare
from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY
from hbf.interop import tensors
from hbf.models.build import abstract_params, build_model
from hbf.models.matching import units_of
from hbf.serving.uploads import read_upload
from hbf.training import export
from hbf.training.edits import Edit, Edits
from hbf.training.edits_file import read_edits, to_rows, write_edits
from hbf.training.learned import Learned, LearnedClass, read_learned, write_learned
from hbf.training.restore import restore, stored_dataset
from hbf.training.workdir import load_config, read_predictions, read_result, write_predictions
from hbf.training.writers import MetricsWriter, read_metrics, validation_scores
from tests.training.toy_runs import ONE, save_untrained

ROOM = 2**30  # bytes that a reader may need


# Changes of bytes.

Change = Callable[[bytes], bytes]
_PLACES, _VALUES = (
  st.floats(0, 1),
  st.sampled_from([b'\0', b'\xff', b'\x7f', b'\x80', b'\xff\xff\xff\x7f', b'\0' * 8]),
)


def _overwrite(place: float, value: bytes) -> Change:
  def change(content: bytes) -> bytes:
    at = int(place * len(content))
    return content[:at] + value + content[at + len(value) :]

  return change


def _replace(first: float, second: float, value: bytes) -> Change:
  def change(content: bytes) -> bytes:
    start, stop = sorted(int(place * len(content)) for place in (first, second))
    return content[:start] + value + content[stop:]

  return change


def _repeat(first: float, second: float) -> Change:
  def change(content: bytes) -> bytes:
    start, stop = sorted(int(place * len(content)) for place in (first, second))
    return content[:stop] + content[start:stop] + content[stop:]

  return change


ONE_CHANGE = st.one_of(
  st.builds(_overwrite, _PLACES, st.binary(min_size=1, max_size=4) | _VALUES),
  st.builds(_replace, _PLACES, _PLACES, st.binary(max_size=8)),
  st.builds(_repeat, _PLACES, _PLACES),
)
CHANGES = st.lists(ONE_CHANGE, min_size=1, max_size=4)


def changed(content: bytes, changes: list[Change]) -> bytes:
  for change in changes:
    content = change(content)
  return content


# Changes of JSON and of arrays.

_LEAVES = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
  _LEAVES, lambda z: st.lists(z, max_size=3) | st.dictionaries(st.text(max_size=5), z, max_size=3)
)


def _paths(tree: Any, path: tuple = ()) -> list[tuple]:
  items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
  return [path, *(found for key, value in items for found in _paths(value, (*path, key)))]


def _edited(tree: Any, path: tuple, value: Any, remove: bool) -> Any:
  if not path:
    return value
  made = tree.copy()
  if remove and len(path) == 1:
    del made[path[0]]
  else:
    made[path[0]] = _edited(tree[path[0]], path[1:], value, remove)
  return made


@st.composite
def json_of(draw: st.DrawFn, tree: Any) -> Any:
  """Return a JSON tree with some parts replaced or removed."""
  for _ in range(draw(st.integers(1, 3))):
    tree = _edited(tree, draw(st.sampled_from(_paths(tree))), draw(VALUES), draw(st.booleans()))
  return tree


@st.composite
def json_bytes(draw: st.DrawFn, content: bytes) -> bytes:
  """Return the bytes of a JSON file that is damaged as a text or as a tree."""
  if draw(st.integers(0, 3)) == 0:
    return changed(content, draw(CHANGES))
  return json.dumps(draw(json_of(json.loads(content)))).encode()


@st.composite
def lines_bytes(draw: st.DrawFn, content: bytes) -> bytes:
  """Return the bytes of a file with a JSON object on each line, one of which is damaged."""
  lines = content.splitlines()
  number = draw(st.integers(0, len(lines) - 1))
  lines[number] = draw(json_bytes(lines[number]))
  return b'\n'.join(lines) + b'\n'


_ARRAYS = st.sampled_from(
  [
    np.zeros(()),
    np.zeros(0),
    np.zeros((3, 1, 2)),
    np.array('text'),
    np.array([1 + 2j]),
    np.array([True]),
    np.array([np.nan, np.inf]),
    np.array(['2020-01-01'], 'datetime64[D]'),
    np.zeros(2, [('a', 'i4')]),
  ]
)


@st.composite
def npz_bytes(draw: st.DrawFn, content: bytes) -> bytes:
  """Return the bytes of an .npz file whose bytes, members, arrays or facts are damaged."""
  kind = draw(st.integers(0, 3))
  if kind == 0:
    return changed(content, draw(CHANGES))
  if kind == 1:  # a member is damaged, and its checksum is right
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
      members = {name: archive.read(name) for name in archive.namelist()}
    name = draw(st.sampled_from(sorted(members)))
    members[name] = changed(members[name], draw(CHANGES))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
      for member, value in members.items():
        archive.writestr(member, value)
    return buffer.getvalue()
  with np.load(io.BytesIO(content)) as stored:
    arrays = dict(stored)
  name = draw(st.sampled_from(sorted(arrays)))
  if kind == 2 and 'about' in arrays:
    arrays['about'] = np.array(json.dumps(draw(json_of(json.loads(str(arrays['about']))))))
  elif draw(st.booleans()):
    arrays[name] = draw(_ARRAYS)
  else:
    del arrays[name]
  buffer = io.BytesIO()
  np.savez(buffer, **arrays)
  return buffer.getvalue()


# Files that are whole.


def images() -> list[bytes]:
  """Return small images of all formats and of many kinds."""
  rng = np.random.default_rng(0)
  gray, color = (Image.fromarray(rng.integers(0, 256, shape, np.uint8)) for shape in ((8, 8), (5, 9, 3)))
  deep = Image.fromarray(rng.integers(0, 2**16, (7, 6), np.uint16))
  alpha = Image.fromarray(rng.integers(0, 256, (6, 6, 4), np.uint8), 'RGBA')
  turned = Image.Exif()
  turned[0x0112] = 6
  long = Image.fromarray(rng.integers(0, 256, (1, 60), np.uint8))
  kinds: list[tuple[Image.Image, str, dict]] = [
    *((image, 'PNG', {}) for image in (gray, color, deep, alpha, color.convert('P'), gray.convert('1'), long)),
    (color.convert('P'), 'PNG', {'transparency': 3}),
    (color, 'PNG', {'exif': turned}),
    *((image, 'JPEG', {}) for image in (gray, color, color.convert('CMYK'))),
    (color, 'JPEG', {'progressive': True, 'exif': turned}),
    (color, 'GIF', {}),
    (gray, 'GIF', {'save_all': True, 'append_images': [gray.rotate(90)], 'transparency': 0}),
    *(
      (color, 'TIFF', {'compression': name}) for name in ('raw', 'tiff_lzw', 'tiff_adobe_deflate', 'jpeg', 'packbits')
    ),
    *(
      (image, 'TIFF', {}) for image in (gray, deep, alpha, gray.convert('F'), gray.convert('I'), color.convert('LAB'))
    ),
    (gray.convert('1'), 'TIFF', {'compression': 'group4'}),
    (color, 'WEBP', {}),
    (alpha, 'WEBP', {'lossless': True, 'exif': turned}),
    (color, 'WEBP', {'save_all': True, 'append_images': [color.rotate(180)]}),
    *((image, 'BMP', {}) for image in (gray, color, color.convert('P'))),
    *((image, 'PPM', {}) for image in (gray, color, deep, gray.convert('1'))),
  ]
  found = []
  for image, name, options in kinds:
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    found.append(buffer.getvalue())
  return found


def make_run(folder: pathlib.Path) -> None:
  """Write a run folder with all files that a run can have."""
  data = folder.with_name('data')
  prepare('digits', str(data), archive=None)
  config = digits.get_config('model=identity')
  changes: dict[str, Any] = {'model.width': 8, 'model.depth': 1, 'model.heads': 2, 'data.dir': str(data)}
  config.update_from_flattened_dict(changes | {f'model.{option}': 4 for option in units_of(config.model)})
  save_untrained(resolve(config), folder, 1.0)
  with MetricsWriter(folder, 0) as writer:
    for step in (1, 2):
      writer.write(step, step / 2, 'train', loss=1.0, accuracy=3.0, sigmas={'block0': 1.0})
      writer.write(step, step / 2, 'validation', accuracy=3.0, nll=2.0)
  rng = np.random.default_rng(0)
  write_predictions(folder, {'correct': np.array([True, False]), 'nll': np.array([0.5, 1.0])})
  edits = [Edit('a.png', '1', '2', rng.normal(size=(2, 8)), np.ones(2), rng.normal(size=(2, 10))) for _ in range(2)]
  write_edits(folder, Edits(1, False, np.eye(8), tuple(edits)))
  classes = tuple(LearnedClass(name, ('a.png',), rng.normal(size=8).astype(np.float32)) for name in 'xy')
  learned = Learned(1, False, np.eye(8, dtype=np.float32), np.ones((10, 8), np.float32), classes)
  with tempfile.TemporaryDirectory(dir=folder) as beside:  # a run has one of both files only
    write_learned(pathlib.Path(beside), learned)
    pathlib.Path(beside, 'learned.npz').rename(folder / 'learned.npz')
  (folder / 'result.json').write_text(json.dumps({'n': 2, 'correct': 1, 'accuracy': 50.0, 'steps': 2}))


def make_export(folder: pathlib.Path) -> None:
  """Write an exported classifier."""
  config = resolve(digits.get_config('model=identity')).model
  with config.unlocked():
    config.update(width=8, depth=1, heads=2)
  shapes = abstract_params(build_model(config, 10), (8, 8, 1))
  params = jax.tree.map(lambda z: np.ones(z.shape, z.dtype), shapes)
  about = {'task': 'classification', 'dataset': 'digits', 'classes': [*'abcdefghij'], 'image_shape': [8, 8, 1]}
  about |= {'mean': [0.3], 'std': [0.4], 'recipe': 'small', 'seed': 0, 'step': 3, 'average': False}
  export.export(export.trained(about | {'schema': export.SCHEMA, 'model': config.to_dict()}, params), folder)


# Targets.


@dataclasses.dataclass(frozen=True)
class Target:
  """A file that is damaged, and the function that reads it.

  Attributes:
    path: the file.
    contents: a strategy for its damaged content.
    read: a function that reads it, and raises AssertionError if the value is not of the right kind.
    share: the share of the examples. Slow readers get fewer.
  """

  path: pathlib.Path
  contents: st.SearchStrategy[bytes]
  read: Callable[[], Any]
  share: float = 1.0


def _array(value: Any) -> None:
  assert isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3, value


def image_targets(folder: pathlib.Path) -> dict[str, Target]:
  path, known = folder / 'image', images()
  contents = st.builds(changed, st.sampled_from(known), CHANGES)

  def upload() -> None:
    found = read_upload(path.read_bytes(), (8, 8, 3))
    assert found.shape == (8, 8, 3)
    _array(found)

  return {
    'image-file': Target(path, contents, lambda: _array(decode_file(str(path), channels=1, size=8)), 4.0),
    'image-as-is': Target(path, contents, lambda: _array(decode_file(str(path), channels=3, size=None)), 2.0),
    'image-upload': Target(path, contents, upload, 4.0),
    'image-folder': Target(path, contents, lambda: check_file(str(path)), 2.0),
  }


def run_targets(folder: pathlib.Path) -> dict[str, Target]:
  run = folder / 'run'
  make_run(run)

  def target(name: str, strategy: Callable[[bytes], Any], read: Callable[[], Any], share: float = 1.0) -> Target:
    return Target(run / name, strategy((run / name).read_bytes()), read, share)

  def metrics() -> None:
    assert all(isinstance(line['step'], int) for line in read_metrics(run))
    for step, value in validation_scores(run, ACCURACY).items():
      assert isinstance(step, int) and isinstance(value, float | int), (step, value)
    MetricsWriter(run, 1).close()

  def edits() -> None:
    found = read_edits(run)
    assert found is not None and to_rows(found)
    assert all(edit.centers.shape[1:] == found.metric.shape[1:] for edit in found.edits)

  def learned() -> None:
    found = read_learned(run)
    assert found is not None and all(value.dtype == np.float32 for value in found.params.values())

  def predictions() -> None:
    found = read_predictions(run)
    assert found is not None and all(isinstance(value, np.ndarray) for value in found.values())

  config = load_config(run)
  expected = restore(run, 'latest', ONE, dataset=stored_dataset(run)).params

  def checkpoint() -> None:
    found = restore(run, 'latest', ONE, dataset=stored_dataset(run)).params
    jax.tree.map(np.testing.assert_array_equal, found, expected)

  step = run / 'checkpoints' / '1'
  files = [str(path.relative_to(run)) for path in sorted(step.rglob('*')) if path.is_file()]
  return {
    'config': target('config.json', json_bytes, lambda: load_config(run).model.name, 2.0),
    'data': target('data.json', json_bytes, lambda: stored_dataset(run).class_names),
    'result': target('result.json', json_bytes, lambda: read_result(run, 'n', 'correct')),
    'metrics': target('metrics.jsonl', lines_bytes, metrics, 2.0),
    'edits': target('edits.npz', npz_bytes, edits, 2.0),
    'learned': target('learned.npz', npz_bytes, learned, 2.0),
    'predictions': target('predictions.npz', npz_bytes, predictions),
    'restore': target('config.json', json_bytes, checkpoint, 0.1),
    **{
      f'checkpoint:{name}': target(name, lambda z: st.builds(changed, st.just(z), CHANGES), checkpoint, 0.03)
      for name in files
      if config is not None
    },
  }


def export_targets(folder: pathlib.Path) -> dict[str, Target]:
  made = folder / 'exported'
  make_export(made)
  config, weights = made / export.CONFIG, made / export.TENSORS
  said, params = json.loads(config.read_bytes()), weights.read_bytes()
  size = 8 + int.from_bytes(params[:8], 'little')

  @st.composite
  def headers(draw: st.DrawFn) -> bytes:
    text = draw(json_bytes(params[8:size]))
    return len(text).to_bytes(8, 'little') + text + params[size:]

  def read_tensors() -> None:
    assert all(isinstance(value, np.ndarray) for value in tensors.read(weights).values())

  def load_unchecked() -> None:
    """Read weights whose checksum is right."""
    sums = said['sha256'] | {export.TENSORS: file_sha256(weights)}
    config.write_text(json.dumps(said | {'sha256': sums}))
    export.load_model(made)

  contents = headers() | st.builds(changed, st.just(params), CHANGES)
  return {
    'export-config': Target(config, json_bytes(config.read_bytes()), lambda: export.load_model(made), 0.3),
    'export-program': Target(config, json_bytes(config.read_bytes()), lambda: export.load_program(made), 0.3),
    'safetensors': Target(weights, contents, read_tensors, 2.0),
    'export-weights': Target(weights, contents, load_unchecked, 0.2),
  }


def comparison_targets(folder: pathlib.Path) -> dict[str, Target]:
  made = folder / 'comparison'
  made.mkdir()
  arm = {
    'group': 'digits',
    'label': 'a',
    'arguments': ['--config=digits'],
    'published': None,
    'task': 'classification',
  }
  grid = json.dumps({'arms': [arm], 'seeds': [0, 1]}).encode()
  trial = {'label': 'a', 'number': 0, 'seed': 1000, 'options': {'x': '1'}, 'held_out': 1.0, 'loss': 1.0, 'failed': ''}
  trial |= {'arm': 'a', 'like': 'a', 'group': 'digits', 'task': 'classification', 'run': 'digits-a-t00-1000'}
  tuning = json.dumps({'figure': 'accuracy', 'trials': [trial | {'arguments': ['--config=digits']}]}).encode()
  packed = json.dumps(
    {'run': 'a', 'result': {'n': 1}, 'metrics': [{'step': 1, 'split': 'train'}], 'config': {}}
  ).encode()
  (made / 'grid.json').write_bytes(grid)
  (made / 'tuning.json').write_bytes(tuning)
  (made / 'runs.jsonl').write_bytes(packed + b'\n')

  def read_packed() -> None:
    runs = PackedRuns(made)
    for name in runs.names():
      for read in (runs.result, runs.data, runs.metrics, runs.failure):
        read(name)

  return {
    'grid': Target(made / 'grid.json', json_bytes(grid), lambda: Grid.load(made).runs()),
    'tuning': Target(made / 'tuning.json', json_bytes(tuning), lambda: load_trials(made / 'tuning.json')[0].ranks),
    'packed': Target(made / 'runs.jsonl', lines_bytes(packed + b'\n'), read_packed),
  }


def fuzz(name: str, target: Target, examples: int, seed: int) -> tuple[int, str]:
  """Return the number of examples and a description of failures, or ''."""
  whole, count = target.path.read_bytes() if target.path.exists() else None, 0

  @hypothesis.seed(seed)
  @hypothesis.settings(
    max_examples=max(examples, 1),
    deadline=None,
    database=None,
    suppress_health_check=[*hypothesis.HealthCheck],
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
  )
  @hypothesis.given(target.contents)
  def check(content: bytes) -> None:
    nonlocal count
    count += 1
    target.path.write_bytes(content)
    try:
      target.read()
    except UserError as error:
      assert str(error), 'an empty message'
    except ValueError as error:
      raise AssertionError(f'{type(error).__name__}: {error}') from error

  try:
    if whole is not None:
      target.read()
    check()
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    return count, ''.join(traceback.format_exception(error))
  finally:
    if whole is None:
      target.path.unlink(missing_ok=True)  # another reader has this path too, and no whole file there
    else:
      target.path.write_bytes(whole)
  return count, ''


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--examples', type=int, default=500, help='number of examples for a reader of usual speed')
  parser.add_argument('--only', default='', help='part of the names of the files to damage')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--show', type=int, default=6, help='number of last lines of a failure')
  flags = parser.parse_args()
  total, failed = 0, 0
  logging.disable()
  warnings.simplefilter('ignore')
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place)
    targets: Mapping[str, Target] = {
      **image_targets(folder),
      **run_targets(folder),
      **export_targets(folder),
      **comparison_targets(folder),
    }
    used = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    for name, target in targets.items():
      if flags.only not in name:
        continue
      begin = time.monotonic()
      count, trouble = fuzz(name, target, round(flags.examples * target.share), flags.seed)
      total, failed = total + count, failed + bool(trouble)
      lines = trouble.strip().splitlines()[-flags.show :]
      print(f'{name}: {count} examples, {time.monotonic() - begin:.1f} s', *lines, sep='\n  ', flush=True)
  print(f'{total:,} examples, {failed} readers with failures')
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
