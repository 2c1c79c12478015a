"""Tests of texts by name."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from hbf.cli.prepare import main
from hbf.data.builders import tiny_shakespeare
from hbf.data.images import prepared
from hbf.data.images.prepare import PREPARATIONS, prepare
from hbf.data.text import texts
from hbf.errors import UserError


def load(**changes):
  about = {'name': 'python', 'dir': '/nowhere', 'root': '', 'download': False, 'test_split': 'test'}
  return texts.load_texts(**{**about, 'tokenizer': 'characters', 'vocabulary': 0, **changes})


@pytest.fixture
def plays(tmp_path, monkeypatch):
  """Return the path of a file with the size of tiny Shakespeare."""
  monkeypatch.setattr(tiny_shakespeare, '_CHARACTERS', 1001)
  path = tmp_path / 'input.txt'
  path.write_bytes(bytes(97 + i * i % 26 for i in range(1001)))
  return path


def test_python_brings_a_text():
  found = load()
  train, test = (found.splits[split] for split in ('train', 'test'))
  assert len(train) > 300_000 and abs(len(test) / (len(train) + len(test)) - 0.1) < 0.001
  assert train.dtype == np.uint8 and b'yield' in found.tokenizer.decode(train)


def test_a_file_and_a_folder_are_read_and_cut_at_a_character(tmp_path):
  (tmp_path / 'b.txt').write_text('ä' * 500)
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'c.txt').write_text('xyz')
  one, all_of_it = load(name='text_file', root=str(tmp_path / 'b.txt')), load(name='text_file', root=str(tmp_path))
  assert {split: len(part) for split, part in one.splits.items()} == {'train': 450, 'test': 50}
  whole = b''.join(all_of_it.tokenizer.decode(all_of_it.splits[split]) for split in ('train', 'test'))
  assert whole.decode() == 'xyz\n' + 'ä' * 500


def test_hidden_files_are_no_text(tmp_path):
  for name in ('.git/index', '.hidden', 'a/.git/index'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b'\xff')
  (tmp_path / 'a/b.txt').write_text('xyz' * 10)
  found = load(name='text_file', root=str(tmp_path))
  assert sum(map(len, found.splits.values())) == 30


@pytest.mark.parametrize(
  ('entry', 'said'),
  [
    ('/nowhere', r'notes/x is neither a file nor a folder \(perhaps a broken link\)'),
    ('.', 'notes/x is a link to a folder'),
  ],
)
def test_links_in_a_folder_of_texts_are_not_dropped(entry, said, tmp_path):
  (tmp_path / 'notes').mkdir()
  (tmp_path / 'notes/x').symlink_to(entry)
  with pytest.raises(UserError, match=said):
    load(name='text_file', root=str(tmp_path / 'notes'))


@pytest.mark.parametrize('text', ['', 'x'])
@pytest.mark.parametrize('tokenizer', ['bytes', 'characters', 'bpe'])
def test_an_empty_text_is_refused(text, tokenizer, tmp_path):
  (tmp_path / 'x.txt').write_text(text)
  with pytest.raises(UserError, match=r'x\.txt has no text to train on'):
    load(name='text_file', root=str(tmp_path / 'x.txt'), tokenizer=tokenizer)


def test_tiny_shakespeare_is_tfdss_own(plays, tmp_path):
  prepare('tiny_shakespeare', str(tmp_path / 'tfds'), str(plays))
  builder = prepared.open_texts(prepared.find('tiny_shakespeare', str(tmp_path / 'tfds')))
  assert str(builder.info.full_name) == 'tiny_shakespeare/1.0.0' and [*builder.info.features] == ['text']
  text = plays.read_bytes()
  parts = {split: b''.join(prepared.read_texts(builder, split)) for split in builder.info.splits}
  assert {split: len(part) for split, part in parts.items()} == {'train': 900, 'validation': 50, 'test': 51}
  assert parts['train'] + parts['validation'] + parts['test'] == text
  both = load(name='tiny_shakespeare', dir=str(tmp_path / 'tfds'), test_split='validation+test')
  assert both.tokenizer.decode(both.splits['test']) == text[900:]


def test_tiny_shakespeares_file_is_the_one_that_tfds_knows():
  known = pathlib.Path(tfds.__file__).parent / 'datasets' / 'tiny_shakespeare' / 'checksums.tsv'
  url, _, digest, _ = known.read_text().split()
  published = PREPARATIONS['tiny_shakespeare'].published
  assert (published.url, published.sha256) == (url, digest)


def test_another_file_is_refused(plays, tmp_path, capsys):
  plays.write_text('To be')
  assert main(['tiny_shakespeare', '--archive', str(plays), '--dir', str(tmp_path / 'tfds')]) == 1
  assert 'has 5 bytes, not 1,001 of ASCII; expected input.txt as published' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'name': 'text_file'}, 'data.root names no text: set data.root'),
    ({'name': 'text_file', 'root': '/nowhere/x.txt'}, '/nowhere/x.txt is not there: set data.root'),
    ({'name': 'text_file', 'root': '~nobody-has-this/x.txt'}, '~nobody-has-this/x.txt begins with a home folder'),
    ({'name': 'tiny_shakespeare'}, 'python -m hbf prepare tiny_shakespeare --dir /nowhere'),
    ({'test_split': 'train+test'}, "data.test_split is 'train.test'; expected examples that the run is not"),
    ({'name': 'tiny_shakespear'}, "unknown data set 'tiny_shakespear': did you mean 'tiny_shakespeare'"),
  ],
)
def test_what_is_not_there_is_said(changes, said):
  with pytest.raises(UserError, match=said):
    load(**changes)


def test_images_are_no_texts(digits_dir):
  with pytest.raises(UserError, match='has the features image, label; expected `text`'):
    load(name='digits', dir=str(digits_dir))


@pytest.mark.parametrize('tokenizer', ['bytes', 'characters', 'bpe'])
def test_cached_tokens_are_those_of_the_text(tokenizer, tmp_path, monkeypatch):
  (tmp_path / 'x.txt').write_text('da ß da-da ' * 50)
  about = {'name': 'text_file', 'root': str(tmp_path / 'x.txt'), 'tokenizer': tokenizer, 'vocabulary': 270}
  plain, cached = load(**about), load(**about, cache=str(tmp_path / 'cache'))
  with monkeypatch.context() as patch:
    patch.setattr(texts, 'learn_tokenizer', lambda *_: pytest.fail('It is learned again.'))
    again = load(**about, cache=str(tmp_path / 'cache'))
  for found in (cached, again):
    assert texts.identity_of(found) == texts.identity_of(plain)
    assert found.splits['train'].dtype == plain.splits['train'].dtype and isinstance(found.splits['train'], np.memmap)
  (tmp_path / 'x.txt').write_text('da ß da-do ' * 50)
  assert texts.identity_of(load(**about, cache=str(tmp_path / 'cache'))) == texts.identity_of(load(**about))
  assert len([*(tmp_path / 'cache').glob('*')]) == 2 and not [*tmp_path.rglob('*.tmp')]


def test_damaged_or_impossible_caches_are_refused(tmp_path):
  (tmp_path / 'x.txt').write_text('da da-da ' * 50)
  about = {'name': 'text_file', 'root': str(tmp_path / 'x.txt'), 'cache': str(tmp_path / 'cache')}
  load(**about)
  (tokens,) = (tmp_path / 'cache').glob('*/train.bin')
  about_tokens = tokens.with_name('tokens.json')
  whole = json.loads(about_tokens.read_text())
  for damaged in ([], whole | {'tokenizer': 3}, whole | {'counts': 3}, whole | {'counts': {}}):
    about_tokens.write_text(json.dumps(damaged))
    with pytest.raises(UserError, match='is damaged; expected the tokens of a text: remove it'):
      load(**about)
  about_tokens.write_text(json.dumps(whole))
  load(**about)
  tokens.write_bytes(tokens.read_bytes()[:-1])
  with pytest.raises(UserError, match='is damaged; expected the tokens of a text: remove it'):
    load(**about)
  with pytest.raises(UserError, match=r'x.txt/.* cannot be used .*: set data.cache to another folder'):
    load(**about | {'cache': str(tmp_path / 'x.txt')})
  with pytest.raises(UserError, match=r'data\.cache is gs://bucket/x; expected a folder of this machine'):
    load(**about | {'cache': 'gs://bucket/x'})


def test_the_fingerprint_is_of_every_token():
  one = texts.identity_of(load())
  changed = load()
  changed.splits['test'][1234] ^= 1
  assert one['fingerprint'] != texts.identity_of(changed)['fingerprint'] and one == texts.identity_of(load())
