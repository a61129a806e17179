"""`TextModel`: TransformerLens' methods for texts, on a tokenizer of `transformers`."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformer_lens.utilities import USE_DEFAULT_VALUE, get_tokenizer_with_bos, sample_logits
from transformers import PreTrainedTokenizerBase

from mechicl.base.arguments import checked
from mechicl.base.progress import progress_bar
from mechicl.models.prompted import PromptedModel, with_batch_axis
from mechicl.prompts import Prompts
from mechicl.prompts.tokenizing import own_ids, start_ids

Text = str | Sequence[str]
PaddingSide = Literal["right"] | None
Occurrence = Literal["first", "last"]
MISSING = "this model has no tokenizer: give one of transformers to model.set_tokenizer(tokenizer)"


class TextModel(PromptedModel):
    """The methods of TransformerLens that convert text to token ids and back, and generate tokens.

    `prepend_bos` puts the tokenizer's beginning-of-sequence token first, by default and for None if the config's
    `default_prepend_bos` is True. Texts of different lengths are padded on the right, where causal attention does not
    see the padding; there is no attention mask, so padding on the left is refused.

    Attributes:
        tokenizer: a tokenizer of `transformers`; None if the model has none.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    _start: tuple[int, ...] = ()  # ids that come first with prepend_bos

    @checked
    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase, default_padding_side: PaddingSide = None) -> None:
        """Give the model a copy of a tokenizer of `transformers`, with which it reads and writes text.

        Missing special tokens get TransformerLens' names: `<|endoftext|>` for the end of text, and the end of text for
        padding and beginning. Only "right" is supported as `default_padding_side`.

        Raises:
            TypeError: not a tokenizer of transformers.
            ValueError: padding on the left, or a model of points.
        """
        if self.cfg.prompt_format != "token_ids":
            raise ValueError(f"a model with prompt_format={self.cfg.prompt_format!r} reads points, not text")
        _check_side(default_padding_side=default_padding_side)
        tokenizer = copy.deepcopy(tokenizer)
        # loaded again with `add_bos_token=True`, as TransformerLens does, since some split texts otherwise; that fails
        # for one made in memory, or without a network
        with contextlib.suppress(KeyError, OSError, ValueError):
            tokenizer = get_tokenizer_with_bos(tokenizer)
        tokenizer.padding_side = "right"
        tokenizer.eos_token = tokenizer.eos_token or "<|endoftext|>"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
        self.tokenizer = tokenizer
        self._start = tuple(start_ids(tokenizer) or own_ids(tokenizer, tokenizer.bos_token))

    def to_tokens(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input: Text | Prompts | Tensor,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: PaddingSide = USE_DEFAULT_VALUE,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tensor:
        """Convert text to token ids `[batch pos]`; prompts are encoded, tokens stay unchanged.

        Args:
            input: a text, several texts, prompts or tokens.
            prepend_bos: whether to put the beginning-of-sequence token first; by default the config's
                `default_prepend_bos`.
            padding_side: side on which shorter texts are padded; only "right" (also the default) is supported.
            move_to_device: put the ids on the model's device.
            truncate: cut texts at n_ctx tokens.
        """
        if isinstance(input, Prompts | Tensor):
            return super().to_tokens(input)
        _check_side(padding_side=padding_side)
        rows = [torch.tensor(ids) for ids in self._ids(input, prepend_bos, self.cfg.n_ctx if truncate else None)]
        tokens = pad_sequence(rows, batch_first=True, padding_value=cast(int, self._tokenizer().pad_token_id)).long()
        return tokens.to(self.cfg.device) if move_to_device else tokens

    def _ids(self, texts: Text, prepend_bos: bool | None, n_ctx: int | None) -> list[list[int]]:
        tokenizer, is_default = self._tokenizer(), prepend_bos is None or prepend_bos == USE_DEFAULT_VALUE
        prepends = getattr(self.cfg, "default_prepend_bos", True) if is_default else prepend_bos
        start, texts = list(self._start) if prepends else [], [texts] if isinstance(texts, str) else texts
        return [(start + own_ids(tokenizer, text))[:n_ctx] for text in texts]

    def _read_texts(self, input: Text, prepend_bos: bool | None, padding_side: Any) -> tuple[Tensor, Tensor | None]:
        """Return the ids of texts, and a mask that is False at padding; None without any."""
        tokens = self.to_tokens(input, prepend_bos, padding_side)
        lengths = torch.tensor([len(ids) for ids in self._ids(input, prepend_bos, self.cfg.n_ctx)])
        positions = torch.arange(tokens.shape[1])
        left = padding_side == "left"
        mask = positions >= tokens.shape[1] - lengths[:, None] if left else positions < lengths[:, None]
        return tokens, None if mask.all() else mask.to(self.cfg.device)

    @checked
    def to_string(self, tokens: Int[Tensor, "*shape"] | Sequence[Any] | np.ndarray | int) -> str | list[str]:
        """Convert token ids `[pos]` (or one id) to text, `[batch pos]` to several texts."""
        tokenizer = self._tokenizer()
        ids = tokens if isinstance(tokens, Tensor) else torch.as_tensor(np.array(tokens))
        if ids.ndim > 2:
            raise ValueError(f"tokens must be [batch pos] or [pos], got {tuple(ids.shape)}")
        if ids.ndim == 2:
            return tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)
        return cast(str, tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    @checked
    def to_str_tokens(
        self,
        input: Text | Int[Tensor, "*one pos"] | np.ndarray | Sequence[Any],
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: PaddingSide = USE_DEFAULT_VALUE,
    ) -> Any:
        """Convert each token of a text, or of ids `[pos]` or `[1 pos]`, to a string; a list of texts gives lists."""
        if isinstance(input, list | tuple):
            return [self.to_str_tokens(one, prepend_bos, padding_side) for one in input]
        if isinstance(input, str):
            input = self.to_tokens(input, prepend_bos, padding_side)
        ids = _one_prompt(torch.as_tensor(cast(Any, input)))
        return self._tokenizer().batch_decode([[int(one)] for one in ids], clean_up_tokenization_spaces=False)

    @checked
    def to_single_token(self, string: str | int) -> int:
        """Convert a text of one token to its id; ids stay unchanged."""
        if self.cfg.prompt_format != "token_ids":
            raise ValueError(f"{string!r} is not a token id: this model has prompt_format={self.cfg.prompt_format!r}")
        if isinstance(string, int):
            if not 0 <= string < self.cfg.d_vocab:
                raise ValueError(f"{string} is not a token id: the model has d_vocab={self.cfg.d_vocab}")
            return string
        if self.tokenizer is None:
            raise ValueError(f"{string!r} is not a token id, and {MISSING}")
        ids = self.to_tokens(string, prepend_bos=False)[0]
        if len(ids) != 1:
            raise ValueError(f"{string!r} is {len(ids)} tokens, not one: {self.to_str_tokens(ids)}")
        return int(ids)

    @checked
    def to_single_str_token(self, int_token: int) -> str:
        """Convert one token id to text."""
        return self.to_str_tokens(torch.tensor([int_token]))[0]

    @checked
    def get_token_position(
        self,
        single_token: str | int,
        input: str | Int[Tensor, "*one pos"],
        mode: Occurrence = "first",
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: PaddingSide = USE_DEFAULT_VALUE,
    ) -> int:
        """Find the first or last position of a token in a text, or in ids `[pos]` or `[1 pos]`."""
        tokens = _one_prompt(self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input)
        token = self.to_single_token(int(single_token) if isinstance(single_token, Tensor) else single_token)
        positions = (tokens == token).nonzero()
        if len(positions) == 0:
            raise ValueError(f"the token {single_token!r} does not occur in the prompt")
        return int(positions[0 if mode == "first" else -1])

    @torch.no_grad()
    def generate(
        self,
        input: str | list[str] | Int[Tensor, "batch pos"] = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        return_type: Literal["input", "str", "tokens"] | None = "input",
        verbose: bool = True,
        *,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        use_past_kv_cache: bool = True,
        padding_side: str | None = USE_DEFAULT_VALUE,
    ) -> Any:
        """Generate tokens that continue a text, several texts, or token ids.

        Arguments are those of TransformerLens, and `seed`, the seed of the random draws (by default torch's global
        generator continues); `use_past_kv_cache` and `padding_side` are ignored. Several texts are continued
        separately. A row of tokens that has ended is filled up with the end-of-sequence token until all have ended.
        `temperature=0` takes the most probable token.

        Returns:
            The prompt and the new tokens: a text, a list of texts, or token ids `[batch pos_and_new]`.
        """
        if return_type not in ("input", "str", "tokens"):
            raise ValueError(f"return_type={return_type!r} is not one of ('input', 'str', 'tokens')")
        stops = self._stop_tokens(eos_token_id) if stop_at_eos else torch.empty(0, dtype=torch.long)
        if isinstance(input, Tensor):
            prompts = [with_batch_axis(input)]
        else:
            prompts = [self.to_tokens(text, prepend_bos) for text in ([input] if isinstance(input, str) else input)]
        options: dict[str, Any] = {
            "top_k": top_k, "top_p": top_p, "temperature": temperature, "freq_penalty": freq_penalty,
            "repetition_penalty": repetition_penalty,
        }  # fmt: skip
        results = []
        with _seeded(seed), progress_bar(total=max_new_tokens * len(prompts), unit="token", progress=verbose) as bar:
            for tokens in prompts:
                stops, length = stops.to(tokens), tokens.shape[1]
                for _ in range(max_new_tokens):
                    logits = self(tokens, at="query")[:, -1]
                    new = sample_logits(logits, tokens=tokens, **options) if do_sample else logits.argmax(-1)
                    ended = torch.isin(tokens[:, length:], stops).any(1)
                    if ended.any():
                        new = torch.where(ended, stops[0], new)
                    tokens = torch.cat([tokens, new[:, None].to(tokens)], dim=1)
                    bar.update()
                    if len(stops) and torch.isin(tokens[:, length:], stops).any(1).all():
                        break
                results.append(tokens)
        if return_type == "str" or (return_type == "input" and not isinstance(input, Tensor)):
            rows = [row for tokens in results for row in tokens]
            decoded = [cast(str, self._tokenizer().decode(row, skip_special_tokens=True)) for row in rows]
            return decoded[0] if len(decoded) == 1 else decoded
        longest = max(row.shape[1] for row in results)
        if all(row.shape[1] == longest for row in results):
            return torch.cat(results)
        pad = cast(int, self._tokenizer().pad_token_id)  # on the left, as TransformerLens does
        return torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=pad) for row in results])

    def _stop_tokens(self, eos_token_id: int | Sequence[int] | None) -> Int[Tensor, "token"]:
        if eos_token_id is None:
            if self.tokenizer is None or self.tokenizer.eos_token_id is None:
                raise ValueError("stop_at_eos needs an end-of-sequence token: give eos_token_id=, or stop_at_eos=False")
            eos_token_id = cast(int, self.tokenizer.eos_token_id)
        return torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id))

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(MISSING)
        return self.tokenizer


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """A context in which torch's global generators start from a seed; their states are restored at its end."""
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _one_prompt(tokens: Tensor) -> Int[Tensor, "pos"]:
    tokens = tokens[0] if tokens.ndim == 2 and len(tokens) == 1 else tokens
    if tokens.ndim > 1:
        raise ValueError(f"tokens must be those of one prompt, [pos] or [1 pos], got {tuple(tokens.shape)}")
    return tokens.reshape(-1)


def _check_side(**sides: Any) -> None:
    for name, side in sides.items():
        if side not in (USE_DEFAULT_VALUE, None, "right"):
            raise ValueError(f"{name}={side!r}: without an attention mask, padding on the left would be attended to")
