"""Texts as numbers: bytes, characters, or pieces of words that a byte-pair encoding has learned."""

import abc
import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from hbf.errors import UserError, choose

_SHOWN = 5  # characters that a message names


class Tokenizer(abc.ABC):
  """A vocabulary of tokens 0, …, V − 1, and the conversion of texts to tokens.

  Attributes:
    kind: name of the kind of tokenizer.
  """

  kind: ClassVar[str]

  @classmethod
  @abc.abstractmethod
  def learned(cls, texts: Sequence[bytes], size: int) -> Self:
    """Learn the tokenizer of some texts. `size` is the number of tokens if that is a choice.

    Raises:
      UserError: the texts cannot be read in this way.
    """

  @property
  @abc.abstractmethod
  def vocabulary(self) -> int:
    """The number of tokens, V."""

  @abc.abstractmethod
  def encode(self, text: bytes) -> np.ndarray:
    """Return the tokens of a text, int32 [n].

    Raises:
      UserError: the text has a character or byte that no token stands for.
    """

  @abc.abstractmethod
  def decode(self, tokens: Sequence[int]) -> bytes:
    """Return the text of tokens."""

  @property
  def sizes(self) -> np.ndarray:
    """Return the number of bytes that each token stands for, int32 [V]."""
    return np.array([len(self.decode([token])) for token in range(self.vocabulary)], np.int32)

  @abc.abstractmethod
  def to_json(self) -> dict[str, Any]:
    """Return a dict for JSON, from which `read_tokenizer` makes the tokenizer again."""


@dataclasses.dataclass(frozen=True)
class Bytes(Tokenizer):
  """A tokenizer whose tokens are the bytes. It takes any file."""

  kind: ClassVar[str] = 'bytes'

  @classmethod
  def learned(cls, texts: Sequence[bytes], size: int) -> Self:
    """Return the tokenizer. Nothing is learned."""
    del texts, size
    return cls()

  @property
  def vocabulary(self) -> int:
    """The number of bytes, 256."""
    return 256

  def encode(self, text: bytes) -> np.ndarray:
    """Return the tokens of a text, see `Tokenizer.encode`."""
    return np.frombuffer(text, np.uint8).astype(np.int32)

  def decode(self, tokens: Sequence[int]) -> bytes:
    """Return the text of tokens."""
    return bytes(map(int, tokens))

  def to_json(self) -> dict[str, Any]:
    """Return a dict for JSON."""
    return {'kind': self.kind}


@dataclasses.dataclass(frozen=True)
class Characters(Tokenizer):
  """A tokenizer whose tokens are the characters of some texts.

  Attributes:
    characters: the character of each token, sorted.
  """

  kind: ClassVar[str] = 'characters'

  characters: str

  @classmethod
  def learned(cls, texts: Sequence[bytes], size: int) -> Self:
    """Learn all characters that occur."""
    del size
    return cls(''.join(map(chr, np.unique(np.concatenate([_codes(text) for text in texts])).tolist())))

  @property
  def vocabulary(self) -> int:
    """The number of tokens."""
    return len(self.characters)

  def encode(self, text: bytes) -> np.ndarray:
    """Return the tokens of a text, see `Tokenizer.encode`."""
    codes, known = _codes(text), np.array([ord(character) for character in self.characters])
    tokens = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    unknown = sorted({chr(code) for code in codes[known[tokens] != codes]})
    if unknown:
      more = f' and {len(unknown) - _SHOWN} more' if len(unknown) > _SHOWN else ''
      raise UserError(
        f'the vocabulary lacks the characters {", ".join(map(repr, unknown[:_SHOWN]))}{more}: use only the '
        f'{self.vocabulary} that the model was trained on, or train one with --config.data.tokenizer=bytes'
      )
    return tokens.astype(np.int32)

  def decode(self, tokens: Sequence[int]) -> bytes:
    """Return the text of tokens."""
    return ''.join(self.characters[int(token)] for token in tokens).encode()

  def to_json(self) -> dict[str, Any]:
    """Return a dict for JSON."""
    return {'kind': self.kind, 'characters': self.characters}


@dataclasses.dataclass(frozen=True)
class BytePairs(Tokenizer):
  """A tokenizer whose tokens are pieces of words (Sennrich et al. 2016; the form is GPT-2's).

  The pieces are learned: they begin as bytes, and the pair that occurs most becomes a new piece, again and again.

  Attributes:
    learned_pieces: the pieces as the library `tokenizers` writes them.
  """

  kind: ClassVar[str] = 'bpe'

  learned_pieces: str

  @classmethod
  def learned(cls, texts: Sequence[bytes], size: int) -> Self:
    """Learn pieces from the first text, which is the one to train on."""
    if size < 257:
      raise UserError(f'data.vocabulary must be 257 or more, as 256 bytes are tokens already: it is {size}')
    library = _import_library()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_decoded(texts[0]).splitlines(keepends=True), trainer)
    return cls(made.to_str())

  @functools.cached_property
  def _library(self) -> Any:
    return _import_library().Tokenizer.from_str(self.learned_pieces)

  @property
  def vocabulary(self) -> int:
    """The number of tokens."""
    return self._library.get_vocab_size()

  def encode(self, text: bytes) -> np.ndarray:
    """Return the tokens of a text, see `Tokenizer.encode`."""
    return np.array(self._library.encode(_decoded(text)).ids, np.int32)

  def decode(self, tokens: Sequence[int]) -> bytes:
    """Return the text of tokens."""
    # Not the library's: a piece may end within a character, which it would replace.
    pieces = ''.join(str(self._library.id_to_token(int(token))) for token in tokens)
    return bytes(_BYTE_OF[character] for character in pieces)

  def to_json(self) -> dict[str, Any]:
    """Return a dict for JSON."""
    return {'kind': self.kind, 'learned_pieces': self.learned_pieces}


def _import_library() -> types.ModuleType:
  """Import the library `tokenizers`, which only the extra `text` installs.

  Raises:
    UserError: it isn't installed.
  """
  try:
    import tokenizers
  except ImportError as error:
    raise UserError(
      'data.tokenizer is bpe: expected the package tokenizers; install hbf[text], or set it to bytes or characters'
    ) from error
  return tokenizers


def _byte_of() -> dict[str, int]:
  """Return the byte that each character of a piece stands for. GPT-2 writes invisible bytes as other characters."""
  seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
  unseen = [byte for byte in range(256) if byte not in seen]
  return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}


_BYTE_OF = _byte_of()
TOKENIZERS: Mapping[str, type[Tokenizer]] = {made.kind: made for made in (Bytes, Characters, BytePairs)}


def learn_tokenizer(kind: str, texts: Sequence[bytes], size: int) -> Tokenizer:
  """Learn a tokenizer of a kind for some texts. The first text is the one to train on.

  Args:
    kind: 'bytes', 'characters' or 'bpe'.
    texts: all texts that are to be read.
    size: number of tokens of 'bpe'.

  Raises:
    UserError: the kind is unknown, or it cannot read one of the texts.
  """
  return choose('data.tokenizer', kind, TOKENIZERS).learned(texts, size)


def read_tokenizer(stored: Mapping[str, Any]) -> Tokenizer:
  """Return the tokenizer that `to_json` wrote."""
  return TOKENIZERS[stored['kind']](**{key: value for key, value in stored.items() if key != 'kind'})


def _decoded(text: bytes) -> str:
  try:
    return text.decode()
  except UnicodeDecodeError as error:
    raise UserError(
      f'byte {error.start:,} of the text is no UTF-8 ({error.reason}): convert it, or set data.tokenizer to bytes'
    ) from None


def _codes(text: bytes) -> np.ndarray:
  """Return the characters of a text as numbers, uint32 [n]."""
  return np.frombuffer(_decoded(text).encode('utf-32-le'), np.uint32)
