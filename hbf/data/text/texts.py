"""Data sets of texts by name. The rest of the library opens texts only through this module."""

import dataclasses
import functools
import hashlib
import pathlib
import pydoc_data.topics
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hbf.arguments import home_path
from hbf.data import registry
from hbf.data.datasets import refuse_test_on_train
from hbf.data.images import prepare, prepared
from hbf.data.images.files import list_folder
from hbf.data.registry import DataRequest, Opener
from hbf.data.text.cached import encode_pieces, through_cache
from hbf.data.text.tokenizers import Tokenizer, learn_tokenizer
from hbf.errors import UserError

TEST_PART = 0.1  # fraction at the end of a text that becomes the test split, if the text has no splits
_HASHED = 2**22  # number of tokens that are copied at once for their hash


@dataclasses.dataclass(frozen=True)
class Texts:
  """A text to train on and a text to test on.

  Attributes:
    name: name of the data set.
    tokenizer: the tokenizer of both texts.
    splits: the tokens of the splits `train` and `test`, [L] each, by name of the split. Their type is the smallest
      unsigned integer type that can hold every token.
  """

  name: str
  tokenizer: Tokenizer
  splits: Mapping[str, np.ndarray]


def load_texts(
  *,
  name: str,
  dir: str,
  root: str,
  download: bool,
  test_split: str,
  tokenizer: str,
  vocabulary: int,
  cache: str = '',
) -> Texts:
  """Open a data set of texts.

  Args:
    name: 'python' (the language reference that comes with Python), 'text_file', 'tiny_shakespeare', or any data set
      with a feature `text` that TFDS has prepared in `dir`, or a data set of `hbf.register_dataset`.
    dir: the TFDS data directory. `~` is the home directory.
    root: the file or folder of a `text_file`. The files of a folder are joined in the order of their paths. Hidden
      files and folders are left out. A registered data set gets `root` too. Others ignore it.
    download: True to fetch and prepare a data set that is not in `dir`.
    test_split: TFDS's name of the split to test on. A plus joins several, as in 'validation+test'.
    tokenizer: 'bytes', 'characters' or 'bpe'.
    vocabulary: number of tokens of 'bpe'. 256 of them are the bytes, the others are learned from the training text.
      Other tokenizers ignore this number.
    cache: a folder for the tokens, which later calls read. '': texts are encoded each time.

  Raises:
    UserError: the data set is unknown, not prepared or damaged, or has no texts. The message says what to do.
  """
  refuse_test_on_train(test_split)
  used = {'train': 'train', 'test': test_split}
  request = DataRequest(name, home_path(dir), root, download=download, splits=used)
  text_by_split = _as_texts(registry.opener(name, _OPENERS, _open_prepared)(request), name)
  for split, text in text_by_split.items():
    if not text:
      raise UserError(f'{root or name} has no text to {split} on; expected some: take a longer text')
  learn = functools.partial(learn_tokenizer, tokenizer, list(text_by_split.values()), vocabulary)
  if cache:
    return Texts(name, *through_cache(text_by_split, learn, [tokenizer, vocabulary], cache))
  learned = learn()
  return Texts(name, learned, {split: _encode(learned, text) for split, text in text_by_split.items()})


def identity_of(texts: Texts) -> dict[str, Any]:
  """Return the identity of texts, for JSON.

  It contains the data set's name, the tokenizer, the number of tokens in each split, and the SHA-256 of all tokens.
  """
  digest = hashlib.sha256()
  for split, tokens in sorted(texts.splits.items()):
    digest.update(f'{split} {len(tokens)} '.encode())
    for start in range(0, len(tokens), _HASHED):
      digest.update(tokens[start : start + _HASHED].astype('<u4').tobytes())
  return {
    'name': texts.name,
    'tokenizer': texts.tokenizer.to_json(),
    'splits': {split: len(tokens) for split, tokens in texts.splits.items()},
    'fingerprint': digest.hexdigest(),
  }


def _encode(tokenizer: Tokenizer, text: bytes) -> np.ndarray:
  """Return the tokens of a text, [L], in the smallest unsigned integer type that can hold every token."""
  return np.concatenate([*encode_pieces(tokenizer, text)])


def _as_texts(opened: Any, name: str) -> dict[str, bytes]:
  """Return the training text and the test text that a function opened.

  A function may also return one text, which is then split. A text may be str in place of bytes.

  Args:
    opened: what the function returned.
    name: name of the data set, for messages.

  Raises:
    UserError: the function returned something else.
  """
  parts = _split(_encoded(opened)) if isinstance(opened, str | bytes) else opened
  is_pair = isinstance(parts, Mapping) and {*parts} == {'train', 'test'}
  if not is_pair or not all(isinstance(part, str | bytes) for part in parts.values()):
    raise UserError(
      f'the data set {name} is of type {type(opened).__name__}; expected a text, or a dict of the texts train and '
      'test: return it from the registered function'
    )
  return {split: _encoded(parts[split]) for split in ('train', 'test')}


def _encoded(text: str | bytes) -> bytes:
  try:
    return text.encode() if isinstance(text, str) else text
  except UnicodeEncodeError as error:
    raise UserError(f'the text of a registered function is not Unicode ({error}): return its bytes instead') from None


def _open_python_help(request: DataRequest) -> str:
  """Return Python's language reference, from the topics of Python's help. It changes with Python's version."""
  topics = pydoc_data.topics.topics
  return '\n'.join(topics[name] for name in sorted(topics))


def _open_files(request: DataRequest) -> bytes:
  """Return the text in the file or folder `data.root`."""
  root = request.root
  path = pathlib.Path(home_path(root))
  if not root or not path.exists():
    problem = f'{root} is not there' if root else 'data.root names no text'
    raise UserError(
      f'{problem}: set data.root to a text file, or to a folder of text files (commands for trained runs: '
      '--data_root)'
    )
  files = sorted(_files(path)) if path.is_dir() else [path]
  try:
    return b'\n'.join(file.read_bytes() for file in files)
  except OSError as error:
    raise UserError(
      f'{root} cannot be read ({error}): set data.root to a text file, or to a folder of text files'
    ) from None


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yield all files in a folder and its subfolders, except hidden ones."""
  folders, files = list_folder(folder)
  yield from (folder / name for name in files)
  for name in folders:
    if (folder / name).is_symlink():  # A cycle of links would never end.
      raise UserError(f'{folder / name} is a link to a folder; expected files and folders: replace or remove it')
    yield from _files(folder / name)


def _split(text: bytes) -> dict[str, bytes]:
  """Split a text into train and test. Test is the fraction TEST_PART at the end of the text, in whole characters."""
  at = int(len(text) * (1 - TEST_PART))
  while at < len(text) and text[at] & 0xC0 == 0x80:  # This byte continues a character of UTF-8.
    at += 1
  return {'train': text[:at], 'test': text[at:]}


def _open_prepared(request: DataRequest) -> dict[str, bytes]:
  """Return the texts of a data set that TFDS has prepared. A split 'A+B' is the text of A, then the text of B."""
  builder = prepared.open_texts(prepare.found_or_prepared(request.name, request.dir, request.download))
  return {
    split: b''.join(b'\n'.join(prepared.read_texts(builder, part)) for part in parts.split('+'))
    for split, parts in request.splits.items()
  }


# The functions that open the texts of this package, by name. Others are registered, or prepared by TFDS.
_OPENERS: dict[str, Opener] = {
  **dict.fromkeys(prepare.BUILT_IN, _open_prepared),
  'python': _open_python_help,
  'text_file': _open_files,
}
