"""Images in Parquet, tar and .npz files give the batches of an image folder, and wrong files are named."""

import contextlib
import errno
import io
import json
import os
import pickle
import shutil
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hbf.data.datasets import load
from hbf.data.images import cached, parquet, sources
from hbf.data.images.sources import hold_out
from hbf.data.pipeline.identity import identity
from hbf.data.pipeline.inputs import make_input
from hbf.data.pipeline.order import TrainOrder
from hbf.errors import Notice, UserError

CLASSES = ('cat', 'dog', 'owl')
COUNTS = {'train': 11, 'test': 5, 'val': 3}
FORMATS = ('parquet', 'webdataset', 'array_files')


def encoded(pixels, kind='PNG'):
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, format=kind)
  return buffer.getvalue()


def write_folder(root, split, images, labels):
  for number, (image, label) in enumerate(zip(images, labels, strict=True)):
    path = root / split / CLASSES[label] / f'{number:03d}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(image))


def write_rows(path, images, labels, columns=('image', 'label'), described=True):
  """Write a Parquet file with two rows in a group. Describe its columns as `datasets` does."""
  types = {'image': {'_type': 'Image'}, 'label': {'_type': 'ClassLabel', 'names': list(CLASSES)}}
  about = dict(zip(columns, types.values(), strict=True))
  metadata = {'huggingface': json.dumps({'info': {'features': about}})} if described else None
  pixels = pa.array([{'bytes': image, 'path': None} for image in images])
  table = pa.table({columns[0]: pixels, columns[1]: pa.array(labels)}).replace_schema_metadata(metadata)
  path.parent.mkdir(parents=True, exist_ok=True)
  pq.write_table(table, path, row_group_size=2)


def write_tar(path, members):
  path.parent.mkdir(parents=True, exist_ok=True)
  with tarfile.open(path, 'w') as tar:
    for name, content in members.items():
      entry = tarfile.TarInfo(name)
      entry.size = len(content)
      tar.addfile(entry, io.BytesIO(content))


def members(images, labels, start=0):
  """Return the members of a tar file. The labels are in files of both kinds."""
  found = {}
  for key, (image, label) in enumerate(zip(images, labels, strict=True), start):
    found[f'./{key:03d}.png'] = image
    found[f'./{key:03d}.json'] = json.dumps({'label': CLASSES[label], 'size': 1}).encode()
  return found


@pytest.fixture(scope='module')
def roots(tmp_path_factory):
  """Return the path of the same images in each format."""
  root = tmp_path_factory.mktemp('formats')
  generator, arrays = np.random.default_rng(0), {'class_names': np.array(CLASSES)}
  for split, count in COUNTS.items():
    images = generator.integers(0, 256, (count, 10, 14, 3), np.uint8)
    labels = np.arange(count) * 3 // count
    arrays |= {f'x_{split}': images, f'y_{split}': labels}
    write_folder(root / 'image_folder', split, images, labels)
    files, half = [encoded(image) for image in images], count // 2
    for number, part in enumerate((slice(0, half), slice(half, count))):
      name = f'{split}-{number:05d}-of-00002'
      write_rows(root / 'parquet/data' / f'{name}.parquet', files[part], labels[part].tolist())
      write_tar(root / 'webdataset' / f'{name}.tar', members(files[part], labels[part], part.start))
  np.savez(root / 'arrays.npz', **arrays)
  return {name: root / name for name in ('image_folder', 'parquet', 'webdataset')} | {
    'array_files': root / 'arrays.npz'
  }


def opened(name, root, image_size=8, splits=('test', 'val'), **changes):
  test, validation = splits
  about = {'dir': '', 'image_size': image_size, 'download': False, 'test_split': test, 'validation_split': validation}
  return load(name=name, root=str(root), **about, **changes)


@pytest.mark.parametrize('image_size', [0, 8])
@pytest.mark.parametrize('name', FORMATS)
def test_a_format_gives_the_examples_of_an_image_folder(name, image_size, roots):
  expected, found = (opened(which, roots[which], image_size) for which in ('image_folder', name))
  assert (found.name, found.classes, found.image_shape) == (name, expected.classes, expected.image_shape)
  for split, source in expected.splits.items():
    other = pickle.loads(pickle.dumps(found.splits[split]))  # as a process that reads images gets it
    np.testing.assert_array_equal(sources.labels(other), sources.labels(source))
    sources.check(other, np.arange(len(other)))
    for one, two in zip(
      sources.read(source, np.arange(len(source))), (other[i] for i in range(len(other))), strict=True
    ):
      np.testing.assert_array_equal(one[0], two[0])
      assert one[1] == two[1]


@pytest.mark.parametrize('name', FORMATS)
def test_a_format_gives_the_batches_of_an_image_folder(name, roots, sharding):
  batches = []
  for which in ('image_folder', name):
    train = hold_out(opened(which, roots[which]).splits['train'], 0.3, stratify=True)[0]
    feed = make_input('stream', train, sharding, workers=0, resident_bytes=0)
    batches.append([*feed.batches(TrainOrder(0, len(train), 8), 1, 3)])
  for one, two in zip(*batches, strict=True):
    for key in ('index', 'image', 'label'):
      np.testing.assert_array_equal(one[key], two[key])


@pytest.mark.parametrize('name', FORMATS)
def test_the_fingerprint_depends_on_content_not_on_place_or_size(name, roots, tmp_path):
  before = identity(opened(name, roots[name]))
  copied = tmp_path / 'moved' / roots[name].name
  (shutil.copytree if roots[name].is_dir() else shutil.copy)(roots[name], copied.parent.mkdir() or copied)
  assert identity(opened(name, copied)) == before
  assert identity(opened(name, copied, 5))['fingerprint'] == before['fingerprint']
  assert identity(opened(name, copied, splits=('val', 'test')))['fingerprint'] != before['fingerprint']


@pytest.mark.parametrize('name', FORMATS)
def test_a_missing_split_or_path_is_named(name, roots):
  with pytest.raises(UserError, match=r'does not exist.*val.*set data.test_split to the name of the test split'):
    opened(name, roots[name], splits=('tset', ''))
  with pytest.raises(UserError, match=r"'/nowhere' does not exist; expected .*train.*set data.root"):
    opened(name, '/nowhere')
  with pytest.warns(Notice, match=r'val.* is not used: the run trains on .*train.* and tests on .*test'):
    opened(name, roots[name], splits=('test', ''))


# Parquet.

PIXELS = np.random.default_rng(1).integers(0, 256, (10, 10, 3), np.uint8)
IMAGES = [encoded(PIXELS + shift) for shift in range(4)]


def parquet_of(root, labels=(0, 1, 2, 1), images=IMAGES, image_size=8, **changes):
  for split in ('train', 'test'):
    write_rows(root / f'{split}.parquet', images, list(labels), **changes)
  return opened('parquet', root, image_size, ('test', ''))


def test_columns_of_usual_names_and_bytes_need_no_description(tmp_path):
  found = parquet_of(tmp_path, columns=('img', 'fine_label'), described=False)
  assert found.classes == ('0', '1', '2')
  first = found.splits['train'][0][0]
  named = parquet_of(tmp_path, labels=['b', 'a', 'b', 'c'], described=False)
  assert named.classes == ('a', 'b', 'c') and named.splits['train'].read_labels().tolist() == [1, 0, 1, 2]
  table = pa.table({'png': IMAGES, 'y': [0, 1, 0, 1]})
  for split in ('train', 'test'):
    pq.write_table(table, tmp_path / f'{split}.parquet')
  chosen = opened('parquet', tmp_path, splits=('test', ''), columns='png, y')
  np.testing.assert_array_equal(chosen.splits['test'][0][0], first)
  with pytest.raises(UserError, match=r'no column image among its columns png, y; .*set data.columns=IMAGE,LABEL'):
    opened('parquet', tmp_path, splits=('test', ''))


@pytest.mark.parametrize('about', [b'[' * 10**5, b'{"info": {"features": [1]}}', b'3', b'{"info": 3}', b'\xff'])
def test_a_description_of_columns_that_is_no_such_thing_counts_as_none(about, tmp_path):
  table = pa.table({'image': IMAGES, 'label': [0, 1, 0, 1]}).replace_schema_metadata({'huggingface': about})
  for split in ('train', 'test'):
    pq.write_table(table, tmp_path / f'{split}.parquet')
  assert opened('parquet', tmp_path, splits=('test', '')).classes == ('0', '1')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'labels': (0, 1, -1, 1)}, r'train\.parquet: row 0 of row group 1 has the label -1; expected 0 to 2'),
    ({'labels': (0, None, 1, 1)}, r'row 1 of row group 0 has the label None; expected a whole number or a name'),
    (
      {'labels': (1, 1, 1, 1)},
      r'train\.parquet: row 0 of row group 0 has the label 1, and so have all images of train',
    ),
    ({'labels': [*'aaaa'], 'described': False}, r"has the label 'a', and so have all images of train; expected two"),
    ({'labels': (0.5, 1.0, 2.0, 1.0)}, r'train\.parquet has double in column label; expected whole numbers or names'),
    ({'images': [*'abcd']}, r'train\.parquet has struct<bytes: string.* in column image; expected encoded images'),
    ({'images': [], 'labels': []}, r'train\.parquet has null in|struct.*in column image'),
    (
      {'images': [*IMAGES[:3], None]},
      r'row 1 of row group 1 is not an image that can be read \(the file has no bytes',
    ),
    ({'images': [*IMAGES[:3], IMAGES[3][:150]]}, r'row 1 of row group 1 is not an image that can be read'),
    (
      {'images': [*IMAGES[:3], encoded(PIXELS[:5])], 'image_size': 0},
      r'row 1 of row group 1 has 10×5 pixels and the first image has 10×10',
    ),
  ],
)
def test_wrong_rows_are_named(changes, message, tmp_path):
  with pytest.raises(UserError, match=message) as caught:
    sources.check(parquet_of(tmp_path, **changes).splits['train'], np.arange(4))
  assert '\n' not in str(caught.value)


def _cut(path, part=0.5):
  content = path.read_bytes()
  path.write_bytes(content[: int(part * len(content))])


@pytest.mark.parametrize('name', ['parquet', 'webdataset'])
def test_a_missing_or_damaged_shard_is_named(name, roots, tmp_path):
  shutil.copytree(roots[name], tmp_path / 'copy')
  path = next((tmp_path / 'copy').rglob('train-00001-of-00002.*'))
  for part in (0.0, 0.4):
    _cut(path, part)
    with pytest.raises(UserError, match=rf'{path.name} (cannot be read|is cut off, damaged or).*expected') as caught:
      opened(name, tmp_path / 'copy')
    assert '\n' not in str(caught.value)
    shutil.copy(next(roots[name].rglob(path.name)), path)
  path.unlink()
  with pytest.raises(UserError, match=rf'{path.name} is missing; expected all 2 files of the split'):
    opened(name, tmp_path / 'copy')
  shutil.copy(next(roots[name].rglob(path.name)), path)
  shutil.copy(path, path.with_name(path.name.replace('train', 'extra')))  # of a split that is not used
  with pytest.warns(UserWarning, match='extra.* is not used'):
    opened(name, tmp_path / 'copy')


def test_without_pyarrow_the_command_is_named(roots, monkeypatch):
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
  with pytest.raises(UserError, match=r"install it by `pip install 'hbf\[parquet\]'`"):
    opened('parquet', roots['parquet'])


def test_row_groups_leave_the_memory_when_it_is_full(roots, monkeypatch):
  train = opened('parquet', roots['parquet']).splits['train']
  monkeypatch.setattr(parquet, '_KEPT_BYTES', 1)
  expected = [train[index][0].tobytes() for index in range(len(train))]
  assert [train[index][0].tobytes() for index in reversed(range(len(train)))] == expected[::-1]
  assert len(train.memory._kept) == 1


# Tar files.


def tar_of(root, content):
  for split in ('train', 'test'):
    write_tar(root / f'{split}-0.tar', content)
  return opened('webdataset', root, splits=('test', ''))


def test_numbers_are_labels_and_other_members_are_not_used(tmp_path):
  content = {
    'a/0.png': IMAGES[0],
    'a/0.cls': b'2\n',
    'a/0.json': b'{}',
    'a/0.txt': b'x',
    '.hidden': b'',
    'README': b'',
  }
  content['a/0.json'] = b'{"no label": 0}'
  found = tar_of(tmp_path, content | {'a/1.JPG': encoded(PIXELS, 'JPEG'), 'a/1.cls': b'0'})
  assert found.classes == ('0', '1', '2') and found.splits['train'].read_labels().tolist() == [2, 0]
  assert found.splits['train'].name(1).endswith('train-0.tar: a/1.JPG')


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ({'0.png': IMAGES[0]}, r'train-0\.tar: 0\.png has no label; expected 0\.cls with a number'),
    ({'0.png': IMAGES[0], '0.cls': b'cat'}, r'0\.png has no label in 0\.cls; expected a whole number'),
    ({'0.png': IMAGES[0], '0.json': b'{"name": 1}'}, r'0\.png has no label in 0\.json; expected .*"label"'),
    ({'0.png': IMAGES[0], '0.json': b'[' * 10**5}, r'0\.png has no label in 0\.json; expected .*"label"'),
    ({'0.png': IMAGES[0], '0.json': b'{"label": [1]}'}, r'0\.png has the label \[1\]; expected a whole number or'),
    (
      {'0.png': IMAGES[0], '0.json': b'{"label": 0.0}'},
      r'0\.png has the label 0\.0; expected a whole number or a name:',
    ),
    (
      {'0.png': IMAGES[0], '0.json': b'{"label": true}'},
      r'0\.png has the label True; expected a whole number or a name',
    ),
    ({'0.png': IMAGES[0], '0.cls': b'1'}, r'0\.png has the label 1, and so have all images of train; expected two'),
    ({'0.png': IMAGES[0], '0.cls': b'-1'}, r'0\.png has the label -1; expected 0 to 0'),
    ({'0.png': IMAGES[0], '0.jpg': IMAGES[0]}, r'0\.jpg has the key of 0\.png; expected one image for each key'),
    ({'0.txt': b'', '0.cls': b'0'}, r'train-0\.tar has no image; expected KEY\.jpg'),
    ({'\udcff.png': IMAGES[0], '\udcff.cls': b'0'}, r"train-0\.tar: '\\udcff\.png' is not UTF-8; expected a name in"),
    (
      {'0.png': IMAGES[0], '0.json': rb'{"label": "\udcff"}'},
      r"0\.png has the label '\\udcff'; expected a text of whole",
    ),
    (
      {'0.png': IMAGES[0][:150], '0.cls': b'0', '1.png': IMAGES[1], '1.cls': b'1'},
      r'0\.png is not an image that can',
    ),
  ],
)
@pytest.mark.parametrize('image_size', [8])
def test_wrong_members_are_named(content, message, image_size, tmp_path):
  for split in ('train', 'test'):
    write_tar(tmp_path / f'{split}-0.tar', content)
  with pytest.raises(UserError, match=message) as caught:
    sources.check(opened('webdataset', tmp_path, image_size, ('test', '')).splits['train'], np.arange(2))
  assert '\n' not in str(caught.value)


def test_whole_images_in_a_tar_file_are_checked_without_decoding(roots, monkeypatch):
  train = opened('webdataset', roots['webdataset']).splits['train']
  monkeypatch.setattr('hbf.data.images.codec.check_file', None)
  sources.check(train, np.arange(len(train)))


# Arrays.


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'x_test': np.zeros((2, 4, 4, 3), np.uint8)},
      r'a\.npz: x_test has shape \[2, 4, 4, 3\]: expected \[N, 8, 8, 3\]',
    ),
    ({'y_test': None}, r'a\.npz lacks y_test; expected an array y_… for each x_…'),
    ({'y_train': np.array([0, 1, -1])}, r'a\.npz: y_train has label -1'),
    ({'class_names': np.array(3)}, r'a\.npz: class_names is 3: expected two texts or more'),
    ({'class_names': np.array([['a', 'b']] * 3)}, r"a\.npz: class_names is \[\['a', 'b'\].*: expected two texts or"),
    ({'y_train': np.array([0, None, 1])}, r'a\.npz cannot be read \(Object arrays'),
  ],
)
def test_wrong_arrays_are_named(changes, message, tmp_path):
  images, labels = np.zeros((3, 8, 8, 3), np.uint8), np.array([0, 1, 2])
  arrays = {'x_train': images, 'y_train': labels, 'x_test': images, 'y_test': labels} | changes
  np.savez(tmp_path / 'a.npz', **{name: value for name, value in arrays.items() if value is not None})
  with pytest.raises(UserError, match=message):
    opened('array_files', tmp_path / 'a.npz', 0, ('test', ''))


@pytest.mark.parametrize('content', [b'', b'PK\x03\x04 cut off', b'text'])
def test_another_file_than_arrays_is_named(content, tmp_path):
  (tmp_path / 'a.npz').write_bytes(content)
  with pytest.raises(UserError, match=r'a\.npz cannot be read .*: write it again by numpy\.savez'):
    opened('array_files', tmp_path / 'a.npz', 0)


# Decoded images in a cache.


@pytest.mark.parametrize('name', ['image_folder', 'parquet'])
def test_images_in_a_cache_are_the_same_and_are_not_decoded_again(name, roots, tmp_path, monkeypatch):
  plain = opened(name, roots[name])
  first = opened(name, roots[name], cache=str(tmp_path))
  monkeypatch.setattr('hbf.data.images.cached._write', None)
  again = pickle.loads(pickle.dumps(opened(name, roots[name], cache=str(tmp_path))))
  assert identity(plain) == identity(first) == identity(again)
  monkeypatch.setattr('hbf.data.images.encoded.EncodedSource.decode', None)
  for split, source in plain.splits.items():
    assert sources.labels(again.splits[split]).tolist() == sources.labels(source).tolist()
  images = [np.stack([data.splits['train'][i][0] for i in range(11)]) for data in (first, again)]
  monkeypatch.undo()
  np.testing.assert_array_equal(images[0], images[1])
  np.testing.assert_array_equal(images[0], [plain.splits['train'][i][0] for i in range(11)])


def write_split(name, root, split, files):
  """Write the encoded images of a split, of two classes, in a format. Return what data.root is then."""
  labels = [number % 2 for number in range(len(files))]
  if name == 'parquet':
    write_rows(root / f'{split}.parquet', files, labels)
  elif name == 'webdataset':
    write_tar(root / f'{split}.tar', members(files, labels))
  elif name == 'image_folder':
    for number, (file, label) in enumerate(zip(files, labels, strict=True)):
      path = root / split / CLASSES[label] / f'{number}.png'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(file)
  else:
    root.mkdir(exist_ok=True)
    path = root / 'arrays.npz'
    arrays = dict(np.load(path)) if path.exists() else {}
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
    np.savez(path, **arrays | {f'x_{split}': pixels, f'y_{split}': np.array(labels)})
    return path
  return root


@pytest.mark.parametrize('name', ['image_folder', *FORMATS])
def test_a_cache_has_no_old_image_in_place_of_one_that_has_changed(name, tmp_path, monkeypatch):
  monkeypatch.setattr('hbf.data.pipeline.identity._SAMPLED', 1)  # the image that has changed is no sample
  files, cache = [encoded(PIXELS + shift) for shift in range(6)], str(tmp_path / 'cache')
  for changed in (files, [*files[:3], encoded(PIXELS // 64), *files[4:]]):
    for split in ('train', 'test'):
      root = write_split(name, tmp_path / 'data', split, files if split == 'test' else changed)
    plain, found = (opened(name, root, 0, ('test', ''), cache=where).splits['train'] for where in ('', cache))
    for index in range(6):
      np.testing.assert_array_equal(found[index][0], plain[index][0])
  assert len([*(tmp_path / 'cache').iterdir()]) == 2


@pytest.mark.parametrize('name', FORMATS)
def test_data_that_have_moved_keep_their_cache(name, roots, tmp_path):
  (shutil.copytree if roots[name].is_dir() else shutil.copyfile)(roots[name], tmp_path / 'moved')
  for root in (roots[name], tmp_path / 'moved'):
    opened(name, root, cache=str(tmp_path / 'cache'))
  assert len([*(tmp_path / 'cache').iterdir()]) == 1


def test_another_size_has_another_cache_and_a_damaged_file_is_named(roots, tmp_path):
  for size in (8, 5):
    assert opened('parquet', roots['parquet'], size, cache=str(tmp_path)).splits['train'][0][0].shape == (
      size,
      size,
      3,
    )
  assert len([*tmp_path.iterdir()]) == 2 and len([*tmp_path.rglob('*')]) == 2 + 2 * 3
  path = next(tmp_path.glob('parquet-8x8x3-*/train.npy'))
  for content in (path.read_bytes()[:300], b''):
    path.write_bytes(content)
    with pytest.raises(UserError, match=r'train\.npy is damaged; expected the images of 11 examples: remove it'):
      opened('parquet', roots['parquet'], cache=str(tmp_path))
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=r'cannot be used \(.*set data\.cache to another folder'):
    opened('parquet', roots['parquet'], cache=str(tmp_path / 'file'))


def test_a_cache_finds_a_damaged_image_before_it_decodes_another(roots, tmp_path, monkeypatch):
  root = shutil.copytree(roots['image_folder'], tmp_path / 'images')
  last = sorted((root / 'test').rglob('*.*'))[-1]
  last.write_bytes(last.read_bytes()[:60])
  monkeypatch.setattr('hbf.data.pipeline.identity._SAMPLED', 1)
  monkeypatch.setattr('hbf.data.images.cached._write', None)
  monkeypatch.setattr('hbf.data.images.encoded._PART', 2)
  with pytest.raises(UserError, match=rf'{last.name} '):
    opened('image_folder', root, cache=str(tmp_path / 'cache'))


def test_a_cache_on_a_bucket_is_refused(roots):
  with pytest.raises(UserError, match=r'data\.cache is gs://bucket/x; expected a folder of this machine'):
    opened('parquet', roots['parquet'], cache='gs://bucket/x')


def test_files_of_a_cache_may_be_read_by_all_whom_the_umask_allows(roots, tmp_path):
  before = os.umask(0o022)
  try:
    opened('parquet', roots['parquet'], cache=str(tmp_path))
  finally:
    os.umask(before)
  assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob('*.npy')} == {0o644}


def test_a_full_disk_is_named_and_leaves_no_part_of_a_cache(roots, tmp_path, monkeypatch):
  real_draft = cached.draft

  @contextlib.contextmanager
  def draft(path):
    with real_draft(path) as file:
      monkeypatch.setattr(file, 'write', _full)
      yield file

  monkeypatch.setattr(cached, 'draft', draft)
  with pytest.raises(UserError, match=r'cannot be used \(.*No space left.*a folder with room for all decoded images'):
    opened('parquet', roots['parquet'], cache=str(tmp_path))
  assert not [path for path in tmp_path.rglob('*') if path.is_file()]


def _full(content):
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
