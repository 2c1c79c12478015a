import fcntl
import functools
import hashlib
import http.server
import os
import pathlib
import re
import threading
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds
from archive_files import write_tar

from hbf.cli.prepare import main
from hbf.data.datasets import load
from hbf.data.images import archives, codec, prepared
from hbf.data.images import prepare as prepare_module
from hbf.data.images.prepare import prepare
from hbf.errors import UserError


def _files(folder):
  return {path: path.stat().st_mtime_ns for path in folder.rglob('*')}


def test_command_prepares_once_and_says_where(small_cifar, tmp_path, capsys, offline):
  archive = write_tar(tmp_path / 'a.tar.gz', small_cifar['cifar10'])
  arguments = ['cifar10', '--archive', archive, '--dir', str(tmp_path / 'tfds')]
  folder = tmp_path / 'tfds' / 'cifar10' / '3.0.2'
  assert main(arguments) == 0
  assert capsys.readouterr().out == f'prepared cifar10 in {folder}: 50 train, 10 test\n'
  files = _files(folder)
  assert main(arguments) == 0
  assert capsys.readouterr().out == f'cifar10 is already prepared in {folder}: 50 train, 10 test\n'
  assert _files(folder) == files


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['cifar10', '--archive', 'nowhere.tar.gz'], 'error: nowhere.tar.gz does not exist; expected'),
    (['cifar11'], "error: unknown data set 'cifar11': did you mean 'cifar10'?"),
    (['image_folder'], 'error: image_folder needs no preparation;'),
    (['imagenet2012'], 'error: imagenet2012 is not prepared in'),
  ],
)
def test_command_fails_in_one_line(arguments, message, tmp_path, capsys, offline):
  assert main([*arguments, '--dir', str(tmp_path)]) == 1
  assert capsys.readouterr().err.startswith(message)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('directory', ['file', 'gs://bucket/tfds'])
def test_a_directory_that_can_not_be_written_is_refused(directory, tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('in the way')
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=rf'^{directory} .*; expected'):
    prepare('digits', directory, None)


def test_an_interrupted_preparation_leaves_nothing(tmp_path, monkeypatch):
  def interrupt(image):
    raise KeyboardInterrupt

  monkeypatch.setattr(codec, 'encode_png', interrupt)
  with pytest.raises(KeyboardInterrupt):
    prepare('digits', str(tmp_path), None)
  assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_preparation_are_removed_while_no_other_works(tmp_path):
  left = tmp_path / 'digits' / 'incomplete.ABC123_1.0.0'
  left.mkdir(parents=True)
  (left / 'part').write_text('cut off')
  other = os.open(left.parent, os.O_RDONLY)
  fcntl.flock(other, fcntl.LOCK_SH)  # as another process that prepares the digits
  with prepare_module._without_leftovers(left.parent):
    assert left.exists()
  os.close(other)
  prepare('digits', str(tmp_path), None)
  assert not left.exists() and prepared.find('digits', str(tmp_path))


def test_unprepared_data_name_the_command(tmp_path, offline):
  with pytest.raises(UserError, match=rf'`python -m hbf prepare cifar10 --dir {tmp_path}`'):
    load(name='cifar10', dir=str(tmp_path), root='', image_size=0, download=False)
  with pytest.raises(UserError, match=rf"unknown data set 'mnist'.*TFDS has prepared no mnist in {tmp_path}"):
    load(name='mnist', dir=str(tmp_path), root='', image_size=0, download=False)
  with pytest.raises(UserError, match=rf'ILSVRC2012_img_val.tar .* `tfds build imagenet2012 --data_dir={tmp_path} '):
    load(name='imagenet2012', dir=str(tmp_path), root='', image_size=224, download=True, test_split='validation')
  assert not list(tmp_path.iterdir())


def test_a_set_prepared_by_tfds_itself_is_read_by_name_and_newest_version(tmp_path, offline):
  for version, levels in (('1.9.0', (1, 2)), ('1.10.0', (3, 4))):
    _prepare_own(tmp_path, version, levels)
  data = load(name='own', dir=str(tmp_path), root='', image_size=4, download=False)
  assert data.image_shape == (4, 4, 3) and data.classes == ('a', 'b')
  assert {int(data.splits['train'][i][0].max()) for i in range(2)} == {3, 4}
  with pytest.raises(UserError, match=r'vary in size.*data\.image_size'):
    load(name='own', dir=str(tmp_path), root='', image_size=0, download=False)


def _prepare_own(directory, version, levels, splits=('train', 'test'), unlabeled=()):
  """Prepare a data set with images of different sizes, by TFDS itself."""
  encoded = [codec.encode_png(np.full((4 + number, 6, 3), level, np.uint8)) for number, level in enumerate(levels)]

  class Own(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version(version)
    code_path = None

    def _info(self):
      label = tfds.features.ClassLabel(names=['a', 'b'])
      return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict({'image': tfds.features.Image(shape=(None, None, 3)), 'label': label}),
      )

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(split) for split in splits}

    def _generate_examples(self, split):
      for number, image in enumerate(encoded):
        yield number, {'image': image, 'label': -1 if split in unlabeled else number}

  Own(data_dir=str(directory), file_format='array_record').download_and_prepare()


def _load_own(directory, test_split='test'):
  return load(name='own', dir=str(directory), root='', image_size=4, download=False, test_split=test_split)


def test_the_split_to_test_on_can_have_another_name(tmp_path):
  _prepare_own(tmp_path, '1.0.0', (1, 2), splits=('train', 'validation', 'test'), unlabeled=('test',))
  data = _load_own(tmp_path, 'validation')
  assert data.splits.keys() == {'train', 'test'}
  assert sorted(label for _, label in (data.splits['test'][index] for index in range(2))) == [0, 1]
  with pytest.raises(UserError, match=r"the split 'test' of \S+ has no labels; expected .*train, validation, test"):
    _load_own(tmp_path)


def test_missing_splits_are_named(tmp_path):
  _prepare_own(tmp_path, '1.0.0', (1,), splits=('train', 'validation'))
  with pytest.raises(UserError, match=r"has the splits train, validation, not 'test'; expected .*data\.test_split"):
    _load_own(tmp_path)


def test_a_data_set_is_looked_for_once(tmp_path, monkeypatch):
  found, find = [], prepared.find
  monkeypatch.setattr(prepared, 'find', lambda *arguments: found.append(arguments) or find(*arguments))
  for _ in ('prepared', 'read'):
    found.clear()
    assert len(_load_digits(tmp_path).splits['train']) == 1442
    assert found == [('digits', str(tmp_path))]


def test_another_file_format_says_how_to_convert(tmp_path, capsys):
  folder = prepare('digits', str(tmp_path), None)
  info = folder / 'dataset_info.json'
  info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
  message = rf'{folder} is stored as tfrecord; expected array_record.*--dir.*convert_format'
  with pytest.raises(UserError, match=message):
    _load_digits(tmp_path)
  assert main(['digits', '--dir', str(tmp_path)]) == 1
  assert re.search(message, capsys.readouterr().err)


def _load_digits(directory):
  return load(name='digits', dir=str(directory), root='', image_size=0, download=False)


def test_missing_files_are_named(tmp_path):
  folder = prepare('digits', str(tmp_path), None)
  (missing,) = folder.glob('digits-test*')
  missing.unlink()
  with pytest.raises(UserError, match=rf'{missing} is missing.*remove {folder}'):
    _load_digits(tmp_path)


def test_damaged_records_are_named(tmp_path):
  folder = prepare('digits', str(tmp_path), None)
  (path,) = folder.glob('digits-train*')
  content = path.read_bytes()
  middle = len(content) // 2
  path.write_bytes(content[:middle] + bytes(1000) + content[middle + 1000 :])
  with pytest.raises(
    UserError, match=rf'{folder} is damaged \(.*\); expected the records that TFDS wrote: remove it'
  ):
    _load_digits(tmp_path).splits['train'].read_labels()
  source = prepared.TfdsSource([b'no message', b''], 1, None, 'here')
  for index in range(2):
    with pytest.raises(UserError, match=r'^here is damaged'):
      source[index]


def test_a_missing_split_of_texts_is_no_damage():
  builder = types.SimpleNamespace(data_path='here', info=types.SimpleNamespace(splits={'train': None}))
  with pytest.raises(UserError, match=r"^here has the splits train, not 'test'"):
    next(prepared.read_texts(builder, 'test'))


@pytest.mark.parametrize('name', ['dataset_info.json', 'features.json'])
def test_a_folder_without_its_description_is_named(name, tmp_path):
  folder = prepare('digits', str(tmp_path), None)
  (folder / name).unlink()
  with pytest.raises(UserError, match=rf'{folder} cannot be read .*; expected .* remove') as caught:
    _load_digits(tmp_path)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('content', ['', '{"name": "dig'])
@pytest.mark.parametrize('name', ['dataset_info.json', 'metadata.json'])
def test_a_damaged_description_is_named(name, content, tmp_path):
  folder = prepare('digits', str(tmp_path), None)
  (folder / name).write_text(content)
  with pytest.raises(UserError, match=rf'{folder} cannot be read .*; expected .* remove'):
    _load_digits(tmp_path)


def test_other_features_are_named(tmp_path):
  folder = prepare('digits', str(tmp_path), None)
  features = folder / 'features.json'
  features.write_text(features.read_text().replace('"label"', '"digit"'))
  with pytest.raises(UserError, match='has the features digit, image; expected `image`'):
    _load_digits(tmp_path)


@pytest.fixture
def server(tmp_path):
  """Serve tmp_path/served. The addresses `/short` and `/chunks` break off."""

  class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
      if self.path.startswith('/short'):
        self.send_response(200)
        self.send_header('Content-Length', '1000')
        self.end_headers()
        self.wfile.write(b'x' * 10)
        self.close_connection = True
      elif self.path.startswith('/chunks'):
        self.send_response(200)
        self.send_header('Transfer-Encoding', 'chunked')
        self.end_headers()
        self.wfile.write(b'ff\r\n' + b'x' * 10)
        self.close_connection = True
      else:
        super().do_GET()

    def log_message(self, *args):
      pass

  (tmp_path / 'served').mkdir()
  handler = functools.partial(Handler, directory=str(tmp_path / 'served'))
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as running:
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield f'http://127.0.0.1:{running.server_address[1]}'
    running.shutdown()


def archive_at(url, sha256):
  return archives.Published(url, sha256)


@pytest.fixture
def published(server, small_cifar, tmp_path):
  """Return a published archive on the test server."""
  path = write_tar(tmp_path / 'served' / 'c.tar.gz', small_cifar['cifar10'])
  return archive_at(f'{server}/c.tar.gz', hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest())


def test_download_is_used_and_kept(published, tmp_path, monkeypatch):
  preparation = prepare_module.Preparation(prepare_module.cifar.Cifar10, published)
  monkeypatch.setattr(prepare_module, 'PREPARATIONS', {'cifar10': preparation})
  data = load(name='cifar10', dir=str(tmp_path / 'tfds'), root='', image_size=0, download=True)
  assert len(data.splits['train']) == 50
  downloads = tmp_path / 'tfds' / 'downloads'
  assert [path.name for path in downloads.iterdir()] == ['c.tar.gz']
  before = _files(downloads)
  archives.download(published, str(downloads))
  assert _files(downloads) == before


@pytest.mark.parametrize('damage', [lambda content: content[:-100], lambda content: b'x' + content[1:]])
def test_a_bad_file_in_downloads_is_fetched_anew(damage, published, tmp_path):
  content = (tmp_path / 'served' / 'c.tar.gz').read_bytes()
  (tmp_path / 'c.tar.gz').write_bytes(damage(content))
  path = archives.download(published, str(tmp_path))
  assert pathlib.Path(path).read_bytes() == content


def test_another_file_than_published_is_refused(published, tmp_path):
  (tmp_path / 'served' / 'c.tar.gz').write_bytes(b'an error page')
  with pytest.raises(UserError, match=rf'c\.tar\.gz could not be downloaded \(.*not {published.sha256}\); expected'):
    archives.download(published, str(tmp_path / 'downloads'))
  assert not list((tmp_path / 'downloads').iterdir())


@pytest.mark.parametrize('name', ['missing.zip', 'short.zip', 'chunks.zip'])
def test_a_failed_download_leaves_nothing(server, name, tmp_path):
  with pytest.raises(UserError, match=rf'{name} could not be downloaded.*--archive'):
    archives.download(archive_at(f'{server}/{name}', ''), str(tmp_path / 'downloads'))
  assert not list((tmp_path / 'downloads').iterdir())


@pytest.mark.parametrize('name', ['cifar10', 'cifar100'])
def test_checksums_are_those_of_tfds(name):
  """TFDS's file has lines of URL, size, SHA-256 and name."""
  lines = (pathlib.Path(tfds.__file__).parent / 'url_checksums' / f'{name}.txt').read_text().splitlines()
  published = prepare_module.PREPARATIONS[name].published
  assert (published.url, published.sha256) in {(url, digest) for url, _, digest, _ in map(str.split, lines)}


def test_downloads_are_encrypted():
  urls = [entry.published.url for entry in prepare_module.PREPARATIONS.values() if entry.published]
  assert urls and all(url.startswith('https://') for url in urls)


@pytest.mark.parametrize('name', [name for name, entry in prepare_module.PREPARATIONS.items() if entry.images])
def test_an_archive_holds_what_its_builder_makes_of_it(name, tmp_path):
  entry = prepare_module.PREPARATIONS[name]
  builder = entry.builder(data_dir=str(tmp_path), archive=archives.Archive('none', entry.published.url))
  features = builder.info.features
  assert (features['label'].num_classes, features['image'].shape) == (
    entry.images.classes,
    entry.images.image_shape,
  )
  assert getattr(builder, 'records', entry.images.examples) == entry.images.examples
