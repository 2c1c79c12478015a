"""Texts by name. The rest of the project gets texts here only."""

import dataclasses
import hashlib
import os
import pathlib
import pydoc_data.topics
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hbf.data.datasets import refuse_test_on_train
from hbf.data.images import prepare, prepared
from hbf.data.images.files import list_folder
from hbf.data.text.tokenizers import Tokenizer, learn_tokenizer
from hbf.errors import UserError

TEST_PART = 0.1  # of a text without splits of its own: its end


@dataclasses.dataclass(frozen=True)
class Texts:
  """A text to train on and another to test on.

  Attributes:
    name: name of the data set.
    tokenizer: the tokenizer of both texts.
    splits: tokens of `train` and `test`: unsigned integers [L] of as few bytes as possible.
  """

  name: str
  tokenizer: Tokenizer
  splits: Mapping[str, np.ndarray]


def load_texts(
  *, name: str, dir: str, root: str, download: bool, test_split: str, tokenizer: str, vocabulary: int
) -> Texts:
  """Open a data set of texts.

  Args:
    name: 'python' (the language's reference, which comes with Python), 'text_file', 'tiny_shakespeare', or any data
      set with a feature `text` that TFDS has prepared in `dir`.
    dir: the TFDS data directory; `~` is the home directory.
    root: of a `text_file`: a file, or a folder whose files, in the order of their paths, are one text; hidden files
      and folders are left out.
    download: fetch and prepare the data set if it isn't in `dir`.
    test_split: what a data set of TFDS calls the split to test on; several are joined, as in 'validation+test'.
    tokenizer: 'bytes', 'characters' or 'bpe'.
    vocabulary: number of tokens of 'bpe', which it learns on the text to train on.

  Raises:
    UserError: the data set is unknown, not prepared, damaged or unfit; the message says what to do.
  """
  refuse_test_on_train(test_split)
  if name == 'python':
    found = _cut(_python())
  elif name == 'text_file':
    found = _cut(_read(root))
  else:
    found = _prepared(name, os.path.expanduser(dir), test_split, download)
  for split, text in found.items():
    if not text:
      raise UserError(f'{root or name} has no text to {split} on; expected some: take a longer text')
  made = learn_tokenizer(tokenizer, list(found.values()), vocabulary)
  kind = np.min_scalar_type(made.vocabulary - 1)
  return Texts(name, made, {split: made.encode(text).astype(kind) for split, text in found.items()})


def identity_of(texts: Texts) -> dict[str, Any]:
  """Return facts that tell texts from others, for JSON: name, tokenizer, tokens by split, and a hash of them all."""
  digest = hashlib.sha256()
  for split, tokens in sorted(texts.splits.items()):
    digest.update(f'{split} {len(tokens)} '.encode())
    digest.update(tokens.astype('<u4').tobytes())
  return {
    'name': texts.name,
    'tokenizer': texts.tokenizer.to_json(),
    'splits': {split: len(tokens) for split, tokens in texts.splits.items()},
    'fingerprint': digest.hexdigest(),
  }


def _python() -> bytes:
  """Return the topics of Python's help: half a million characters, which differ between versions."""
  topics = pydoc_data.topics.topics
  return '\n'.join(topics[name] for name in sorted(topics)).encode()


def _read(root: str) -> bytes:
  path = pathlib.Path(root).expanduser()
  if not root or not path.exists():
    said = f'{root} is not there' if root else 'data.root names no text'
    raise UserError(f'{said}: set data.root to a text file, or to a folder of such')
  files = sorted(_files(path)) if path.is_dir() else [path]
  try:
    return b'\n'.join(file.read_bytes() for file in files)
  except OSError as error:
    raise UserError(f'{root} can not be read ({error}): set data.root to a text file, or a folder of such') from None


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yield the files of a folder and of the folders in it, but hidden ones."""
  folders, files = list_folder(folder)
  yield from (folder / name for name in files)
  for name in folders:
    if (folder / name).is_symlink():  # A circle of links would have no end.
      raise UserError(f'{folder / name} is a link to a folder; expected files and folders: replace or remove it')
    yield from _files(folder / name)


def _cut(text: bytes) -> dict[str, bytes]:
  """Split a text into a beginning and an end. The end begins with a whole character."""
  at = int(len(text) * (1 - TEST_PART))
  while at < len(text) and text[at] & 0xC0 == 0x80:  # within a character of UTF-8
    at += 1
  return {'train': text[:at], 'test': text[at:]}


def _prepared(name: str, directory: str, test_split: str, download: bool) -> dict[str, bytes]:
  builder = prepared.open_texts(prepare.found_or_prepared(name, directory, download))
  return {
    split: b''.join(b'\n'.join(prepared.read_texts(builder, part)) for part in theirs.split('+'))
    for split, theirs in (('train', 'train'), ('test', test_split))
  }
