"""Tokens of texts in files, which later runs read in place of encoding the texts again."""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np

from hbf.arguments import cache_folder
from hbf.data.text.tokenizers import Tokenizer, read_tokenizer, split_text
from hbf.errors import UserError
from hbf.files import draft


def token_type(tokenizer: Tokenizer) -> np.dtype:
  """Return the smallest unsigned integer type that can hold every token."""
  return np.min_scalar_type(tokenizer.vocabulary - 1)


def encode_pieces(tokenizer: Tokenizer, text: bytes) -> Iterator[np.ndarray]:
  """Yield the tokens of consecutive pieces of a text, in the type `token_type`."""
  for piece in split_text(text):
    yield tokenizer.encode(piece).astype(token_type(tokenizer))


def through_cache(
  text_by_split: Mapping[str, bytes], learn: Callable[[], Tokenizer], options: Any, directory: str
) -> tuple[Tokenizer, dict[str, np.ndarray]]:
  """Return the tokenizer and the tokens of texts from files in a folder. Write the files if they are missing.

  The files are in a subfolder whose name is a checksum of texts and options. So other texts, or another tokenizer,
  get files of their own. The file `tokens.json` is written last, so a subfolder that has it is complete. The tokens
  are memory-mapped arrays, so only tokens that are used take memory.

  Args:
    text_by_split: the text of each split, by name of the split.
    learn: a function that learns the tokenizer from the texts. It is not called if the files are there.
    options: kind and size of the tokenizer, as values for JSON.
    directory: the folder. `~` is the home directory.

  Raises:
    UserError: the folder is no local one or can't be used, or a file is damaged, or `learn` raises it.
  """
  digest = hashlib.sha256(json.dumps(options).encode())
  for split, text in sorted(text_by_split.items()):
    digest.update(f' {split} {len(text)} '.encode() + hashlib.sha256(text).digest())
  folder = cache_folder(directory) / f'tokens-{digest.hexdigest()[:32]}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / 'tokens.json').exists():
      _write(text_by_split, learn(), folder)
    return _read(folder, text_by_split.keys())
  except OSError as error:
    raise UserError(
      f'{folder} cannot be used ({error}); expected a folder with room for all tokens: set data.cache to another '
      'folder, or to an empty text'
    ) from error


def _write(text_by_split: Mapping[str, bytes], tokenizer: Tokenizer, folder: pathlib.Path) -> None:
  counts = {split: 0 for split in text_by_split}
  for split, text in text_by_split.items():
    with draft(folder / f'{split}.bin') as file:
      for tokens in encode_pieces(tokenizer, text):
        counts[split] += len(tokens)
        file.write(tokens.tobytes())
  with draft(folder / 'tokens.json') as file:
    file.write(json.dumps({'tokenizer': tokenizer.to_json(), 'counts': counts}).encode())


def _read(folder: pathlib.Path, splits: Set[str]) -> tuple[Tokenizer, dict[str, np.ndarray]]:
  try:
    about = json.loads((folder / 'tokens.json').read_text())
    tokenizer, counts = read_tokenizer(about['tokenizer']), about['counts']
    dtype = token_type(tokenizer)
    sizes = {split: (folder / f'{split}.bin').stat().st_size for split in splits}
    if sizes != {split: n * dtype.itemsize for split, n in counts.items()}:
      raise ValueError
  except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
    raise UserError(f'{folder} is damaged; expected the tokens of a text: remove it') from None
  return tokenizer, {split: np.memmap(folder / f'{split}.bin', dtype, 'r', shape=(n,)) for split, n in counts.items()}
