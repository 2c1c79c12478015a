import pickle

import numpy as np
import pytest
import tensorflow_datasets as tfds
from archive_files import write_tar

from hbf.data.datasets import load
from hbf.data.images.prepare import prepare
from hbf.errors import UserError


@pytest.mark.parametrize(('name', 'keys'), [('cifar10', ['label']), ('cifar100', ['coarse_label', 'label'])])
def test_plain_tfds_reads_it_as_its_own(name, keys, small_cifar, tmp_path, offline):
  members = small_cifar[name]
  folder = prepare(name, str(tmp_path / 'tfds'), write_tar(tmp_path / 'a.tar.gz', members))
  assert folder == tmp_path / 'tfds' / name / '3.0.2'
  builder = tfds.builder(name, data_dir=tmp_path / 'tfds')
  assert isinstance(builder, tfds.builder_cls(name)) and builder.is_prepared()
  other = tfds.builder_from_directory(folder)
  assert (other.info.full_name, str(other.version)) == (f'{name}/3.0.2', '3.0.2')
  assert {key: repr(value) for key, value in other.info.features.items()} == {
    key: repr(value) for key, value in builder.info.features.items()
  }
  labels = len(keys)
  for split, files in (('train', sorted(m for m in members if 'batch_' in m or 'train' in m)), ('test', None)):
    files = files or [m for m in members if m.endswith(('test_batch.bin', 'test.bin'))]
    files = [m for m in files if ('test' in m) == (split == 'test')]
    records = np.frombuffer(b''.join(members[m] for m in files), np.uint8).reshape(-1, labels + 3072)
    examples = {example['id'].decode(): example for example in builder.as_data_source(split)}
    assert set(examples) == {f'{split}_{number:05d}' for number in range(len(records))}
    for number, record in enumerate(records):
      example = examples[f'{split}_{number:05d}']
      np.testing.assert_array_equal(example['image'], record[labels:].reshape(3, 32, 32).transpose(1, 2, 0))
      assert [example[key] for key in keys] == record[:labels].tolist()


def test_load_agrees_with_tfds(small_cifar, tmp_path, offline):
  prepare('cifar100', str(tmp_path), write_tar(tmp_path / 'a.tar.gz', small_cifar['cifar100']))
  data = load(name='cifar100', dir=str(tmp_path), root='', image_size=0, download=False)
  assert data.image_shape == (32, 32, 3) and data.classes[42] == 'class42'
  for split, source in data.splits.items():
    source = pickle.loads(pickle.dumps(source))
    expected = tfds.data_source('cifar100', split=split, data_dir=tmp_path)
    assert len(source) == len(expected)
    for index, example in enumerate(expected):
      np.testing.assert_array_equal(source[index][0], example['image'])
      assert source[index][1] == example['label']
    chosen = np.array([7, 0, 7, 3])
    for index, (image, label) in zip(chosen, source.read(chosen), strict=True):
      np.testing.assert_array_equal(image, source[index][0])
      assert label == source[index][1]


def _without(members, name):
  return {key: content for key, content in members.items() if not key.endswith(name)}


def _with(members, name, change):
  return {key: change(content) if key.endswith(name) else content for key, content in members.items()}


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda m: _without(m, 'data_batch_3.bin'), 'lacks cifar-10-batches-bin/data_batch_3.bin'),
    (lambda m: _without(m, 'meta.txt'), 'lacks cifar-10-batches-bin/batches.meta.txt'),
    (lambda m: _with(m, 'data_batch_2.bin', lambda c: c[:-1]), r'has 30729 bytes in \S+data_batch_2.bin, not 30730'),
    (
      lambda m: _with(m, 'test_batch.bin', lambda c: b'\x0a' + c[1:]),
      r'has a label in \S+test_batch.bin that',
    ),
    (lambda m: _with(m, 'meta.txt', lambda c: b'cat\ndog\n'), 'has 2 class names, not 10'),
  ],
)
def test_a_wrong_layout_is_refused(change, message, small_cifar, tmp_path):
  archive = write_tar(tmp_path / 'a.tar.gz', change(small_cifar['cifar10']))
  with pytest.raises(UserError, match=rf'^{archive} {message}.*; expected cifar-10-binary.tar.gz.*download it again'):
    prepare('cifar10', str(tmp_path / 'tfds'), archive)
  assert not list((tmp_path / 'tfds').iterdir())


def test_the_other_archive_is_refused(small_cifar, tmp_path):
  for name, other in (('cifar10', 'cifar100'), ('cifar100', 'cifar10')):
    archive = write_tar(tmp_path / 'a.tar.gz', small_cifar[other])
    with pytest.raises(UserError, match=rf'lacks \S+; expected cifar-{name[5:]}-binary.tar.gz'):
      prepare(name, str(tmp_path), archive)


def test_missing_cut_off_and_foreign_files_are_refused(small_cifar, tmp_path):
  whole = tmp_path / 'whole.tar.gz'
  write_tar(whole, small_cifar['cifar10'])
  cut = tmp_path / 'cut.tar.gz'
  foreign = tmp_path / 'foreign.tar.gz'
  foreign.write_text('<html>404</html>')
  content = whole.read_bytes()
  middle = len(content) // 2
  flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
  for damaged in (b'', *(content[:length] for length in (10, 5_000, middle, len(content) - 4)), flipped):
    cut.write_bytes(damaged)
    with pytest.raises(UserError, match=rf'^{cut} .*expected cifar-10-binary.tar.gz'):
      prepare('cifar10', str(tmp_path / 'tfds'), str(cut))
  with pytest.raises(UserError, match=rf'^{foreign} is cut off, damaged or another kind of file'):
    prepare('cifar10', str(tmp_path / 'tfds'), str(foreign))
  with pytest.raises(UserError, match=r'^nowhere.tar.gz does not exist'):
    prepare('cifar10', str(tmp_path / 'tfds'), 'nowhere.tar.gz')
  assert not list((tmp_path / 'tfds').iterdir())
