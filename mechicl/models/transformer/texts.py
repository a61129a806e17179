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
from transformer_lens import TransformerLensKeyValueCache
from transformer_lens.utilities import (
    USE_DEFAULT_VALUE,
    get_attention_mask,
    get_dataset,
    get_tokenizer_with_bos,
    sample_logits,
)
from transformers import PreTrainedTokenizerBase

from mechicl.base.arguments import checked
from mechicl.base.progress import progress_bar
from mechicl.models.prompted import PromptedModel, with_batch_axis
from mechicl.prompts import Prompts
from mechicl.prompts.tokens import own_ids, start_ids

Text = str | Sequence[str]
PaddingSide = Literal["left", "right"] | None
Occurrence = Literal["first", "last"]
SAMPLES = {
    "neel": "c4_code", "neel-solu-old": "pile", "GPT2LMHeadModel": "openwebtext", "GPTNeoForCausalLM": "pile",
    "GPTNeoXForCausalLM": "pile", "GPTJForCausalLM": "pile", "OPTForCausalLM": "pile",
}  # fmt: skip
"""Names of `get_dataset` for the architectures that TransformerLens 3 has texts for."""
MISSING = "this model has no tokenizer: give one of transformers to model.set_tokenizer(tokenizer)"


class TextModel(PromptedModel):
    """The methods of TransformerLens that convert text to token ids and back, and generate tokens.

    `prepend_bos` puts the tokenizer's beginning-of-sequence token first, by default and for None if the config's
    `default_prepend_bos` is True. Texts of different lengths are padded on the tokenizer's `padding_side`, by default,
    and masks hide the padding. Ids of texts that are padded on the left need an `attention_mask`; where that is the
    tokenizer's side, one is made from the padding at their beginning, unless earlier tokens are in a `past_kv_cache`.

    Attributes:
        tokenizer: a tokenizer of `transformers`; None if the model has none.
        dataset: the texts that `sample_datapoint` draws from, each a mapping with a "text"; None if there are none.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    dataset: Any = None
    _start: tuple[int, ...] = ()  # ids that come first with prepend_bos

    @checked
    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase, default_padding_side: PaddingSide = None) -> None:
        """Give the model a copy of a tokenizer of `transformers`, with which it reads and writes text.

        Missing special tokens get TransformerLens' names: `<|endoftext|>` for the end of text, and the end of text for
        padding and beginning. `default_padding_side` is the side on which shorter texts are padded, by default the
        tokenizer's.

        Raises:
            TypeError: not a tokenizer of transformers.
            ValueError: a model of points.
        """
        if self.cfg.prompt_format != "token_ids":
            raise ValueError(f"a model with prompt_format={self.cfg.prompt_format!r} reads points, not text")
        tokenizer = copy.deepcopy(tokenizer)
        # loaded again with `add_bos_token=True`, as TransformerLens does, since some split texts otherwise; that fails
        # for one made in memory, or without a network
        with contextlib.suppress(KeyError, OSError, ValueError):
            tokenizer = get_tokenizer_with_bos(tokenizer)
        tokenizer.padding_side = default_padding_side or tokenizer.padding_side or "right"
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
            padding_side: side on which shorter texts are padded, "left" or "right"; by default the tokenizer's.
            move_to_device: put the ids on the model's device.
            truncate: cut texts at n_ctx tokens.
        """
        if isinstance(input, Prompts | Tensor):
            return super().to_tokens(input)
        side, pad = self._padding_side(padding_side), self._tokenizer().pad_token_id
        rows = [torch.tensor(ids) for ids in self._ids(input, prepend_bos, self.cfg.n_ctx if truncate else None)]
        if pad is None and len({*map(len, rows)}) > 1:
            raise ValueError("texts of different lengths need a tokenizer with a padding token")
        tokens = pad_sequence(rows, batch_first=True, padding_value=cast(int, pad or 0), padding_side=side).long()
        return tokens.to(self.cfg.device) if move_to_device else tokens

    def _ids(self, texts: Text, prepend_bos: bool | None, n_ctx: int | None) -> list[list[int]]:
        tokenizer, texts = self._tokenizer(), [texts] if isinstance(texts, str) else texts
        start = list(self._start) if self._prepends(prepend_bos) else []
        return [(start + own_ids(tokenizer, text))[:n_ctx] for text in texts]

    def _prepends(self, prepend_bos: bool | None) -> bool:
        is_default = prepend_bos is None or prepend_bos == USE_DEFAULT_VALUE
        return getattr(self.cfg, "default_prepend_bos", True) if is_default else bool(prepend_bos)

    def _read_texts(
        self,
        input: Text | Tensor,
        prepend_bos: bool | None,
        padding_side: Any,
        cache: TransformerLensKeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the ids of texts, and a mask that is False at padding; None if it cannot be found.

        In ids, only padding on the left is found, where that is the tokenizer's side and no token comes before it.
        """
        if isinstance(input, Tensor):
            tokens = with_batch_axis(input)
            if self.tokenizer is None or tokens.is_floating_point() or self._padding_side(padding_side) == "right":
                return tokens, None
            prepends = self._prepends(prepend_bos)
            mask = get_attention_mask(self.tokenizer, tokens, prepends, self._padding_side(padding_side)).bool()
            if cache is not None and len(cache.previous_attention_mask) == len(tokens):
                mask = mask | cache.previous_attention_mask.any(1, keepdim=True).to(mask.device)
        else:
            tokens = self.to_tokens(input, prepend_bos, padding_side)
            lengths = torch.tensor([len(ids) for ids in self._ids(input, prepend_bos, self.cfg.n_ctx)])
            positions = torch.arange(tokens.shape[1])
            left = self._padding_side(padding_side) == "left"
            mask = positions >= tokens.shape[1] - lengths[:, None] if left else positions < lengths[:, None]
        return tokens, mask.to(self.cfg.device)

    def _padding_side(self, padding_side: Any) -> Literal["left", "right"]:
        if padding_side not in (USE_DEFAULT_VALUE, None, "left", "right"):
            raise ValueError(f"padding_side={padding_side!r} is not one of ('left', 'right', None)")
        return cast(Any, padding_side if padding_side in ("left", "right") else self._tokenizer().padding_side)

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
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        return_type: Literal["input", "str", "tokens"] | None = "input",
        verbose: bool = True,
        *,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
    ) -> Any:
        """Generate tokens that continue a text, several texts, or token ids.

        Arguments are those of TransformerLens, and `seed`, the seed of the random draws (by default torch's global
        generator continues). `temperature=0` takes the most probable token. Several texts are padded on the left and
        continued together, with a mask. A row that has ended is filled up with the end-of-sequence token until all
        have ended.

        Args:
            input: a text, several texts, or ids; an `attention_mask` is made from padding on the left, where that is
                the tokenizer's side.
            max_new_tokens: number of tokens to add, at most.
            stop_at_eos: end at the end-of-sequence token.
            eos_token_id: that token, or several; by default the tokenizer's.
            do_sample: draw from the probabilities; False takes the most probable token.
            top_k: draw from this number of the most probable tokens.
            top_p: draw from the most probable tokens that have this probability together.
            temperature: divisor of the logits.
            freq_penalty: subtracted from a token's logit for each time that it occurs.
            use_past_kv_cache: compute keys and values of each position once. They are computed anew with recurrent
                layers, momentum, keys that are not causal, and rotary frequencies that depend on the length.
            prepend_bos: for texts, put the beginning-of-sequence token first.
            padding_side: ignored for texts, as in TransformerLens; for ids, the side of their padding.
            return_type: "str", "tokens", or "input" for what the input is.
            verbose: show a progress bar.
            repetition_penalty: divisor of the logits of tokens that occur.
            seed: seed of the draws.

        Returns:
            The prompt and the new tokens: a text, a list of texts, or token ids `[batch pos_and_new]`.
        """
        if return_type not in ("input", "str", "tokens"):
            raise ValueError(f"return_type={return_type!r} is not one of ('input', 'str', 'tokens')")
        options: dict[str, Any] = {
            "top_k": top_k, "top_p": top_p, "temperature": temperature, "freq_penalty": freq_penalty,
            "repetition_penalty": repetition_penalty,
        }  # fmt: skip
        stops = self._stop_tokens(stop_at_eos, eos_token_id)
        side = padding_side if isinstance(input, Tensor) else "left"
        tokens, mask = self._read_texts(input, prepend_bos, side)
        prompts = [(tokens, mask)]
        # penalties count all tokens of a row, so that padding would have some
        alone = self._recurrent or self.cfg.momentum or freq_penalty or repetition_penalty != 1
        if mask is not None and not mask.all() and alone:
            prompts = [(row[kept][None], None) for row, kept in zip(tokens, mask, strict=True)]
        results = []
        n_new = max_new_tokens * len(prompts)
        with (
            torch.random.fork_rng(enabled=seed is not None),
            progress_bar(total=n_new, unit="token", progress=verbose) as bar,
        ):
            if seed is not None:
                torch.manual_seed(seed)
            for tokens, mask in prompts:
                steps = self._continuations(tokens, mask, stops, use_past_kv_cache, options if do_sample else None)
                for _, new in zip(range(max_new_tokens), steps, strict=False):
                    tokens = torch.cat([tokens, new], dim=1)
                    bar.update()
                results.append(tokens)
        longest = max(row.shape[1] for row in results)
        if any(row.shape[1] < longest for row in results):
            pad = cast(int, self._tokenizer().pad_token_id)
            results = [torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=pad) for row in results]
        tokens = torch.cat(results)
        if return_type == "tokens" or (return_type == "input" and isinstance(input, Tensor)):
            return tokens
        decoded = [cast(str, self._tokenizer().decode(row, skip_special_tokens=True)) for row in tokens]
        return decoded[0] if len(decoded) == 1 else decoded

    @torch.no_grad()
    def generate_stream(
        self,
        input: str | Int[Tensor, "batch pos"] = "",
        max_new_tokens: int = 10,
        max_tokens_per_yield: int = 25,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        **options: Any,
    ) -> Iterator[Int[Tensor, "batch pos"]]:
        """Generate tokens as `generate` does, and yield their ids in pieces, the prompt at the start of the first one.

        A piece ends when it has `max_tokens_per_yield` tokens. The other arguments are those of `generate`, of which
        `verbose`, `padding_side` and `return_type` are ignored: pieces are ids, as in TransformerLens.
        """
        stops = self._stop_tokens(stop_at_eos, eos_token_id)
        options = {name: options[name] for name in options if name not in ("verbose", "padding_side", "return_type")}
        piece, mask = self._read_texts(input, prepend_bos, None if isinstance(input, Tensor) else "left")
        steps = self._continuations(piece, mask, stops, use_past_kv_cache, options if do_sample else None)
        for _, new in zip(range(max_new_tokens), steps, strict=False):
            piece = torch.cat([piece, new], dim=1)
            if piece.shape[1] >= max_tokens_per_yield:
                yield piece
                piece = piece[:, :0]
        if piece.shape[1]:
            yield piece

    def _continuations(
        self, tokens: Tensor, mask: Tensor | None, stops: Tensor, use_cache: bool, options: dict[str, Any] | None
    ) -> Iterator[Int[Tensor, "batch 1"]]:
        """Yield the next token of each row until all have ended; without `options` the most probable one."""
        ended, stops = tokens.new_zeros(len(tokens), dtype=torch.bool), stops.to(tokens.device)
        cache, read = None, tokens
        mask = torch.ones_like(tokens) if mask is None else mask  # no id of a new token is padding
        if use_cache and self.continues:
            cache = TransformerLensKeyValueCache.init_cache(cast(Any, self.cfg), self.cfg.device, len(tokens))
        while not ended.all():
            known = {} if cache is None else {"past_kv_cache": cache}
            logits = self(read, attention_mask=mask, at="query", **known)[:, -1]
            new = logits.argmax(-1) if options is None else sample_logits(logits, tokens=tokens, **options)
            new = new.to(tokens)
            if len(stops):
                new = torch.where(ended, stops[0], new)
                ended = ended | torch.isin(new, stops)
            yield new[:, None]
            tokens = torch.cat([tokens, new[:, None]], dim=1)
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
            read = tokens if cache is None else new[:, None]

    @property
    def continues(self) -> bool:
        """True if the outputs of a longer text follow from its new tokens and earlier keys and values."""
        cfg = self.cfg
        ungrouped = cfg.n_key_value_heads and cfg.ungroup_grouped_query_attention  # caches are for groups
        return cfg.keys == "causal" and not (self._recurrent or cfg.momentum or cfg.rotates_by_length or ungrouped)

    def load_sample_training_dataset(self, **kwargs: Any) -> Any:
        """Load some texts like those that the model was trained on from the hub, into `dataset`; return them.

        Args:
            kwargs: keywords of `transformer_lens.utilities.get_dataset`, such as `cache_dir`.

        Raises:
            ValueError: no such data set is known for the model, or the hub cannot be reached.
        """
        architecture = self.cfg.original_architecture
        if architecture not in SAMPLES:
            raise ValueError(
                f"no training texts are known for original_architecture={architecture!r}: set model.dataset, for "
                "example to transformer_lens.utilities.get_dataset('pile')"
            )
        try:
            self.dataset = get_dataset(SAMPLES[architecture], **kwargs)
        except (OSError, ConnectionError) as error:
            raise ValueError(f"the data set {SAMPLES[architecture]!r} needs the Hugging Face hub: {error}") from error
        return self.dataset

    def sample_datapoint(
        self,
        tokenize: bool = False,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: PaddingSide = USE_DEFAULT_VALUE,
    ) -> str | Int[Tensor, "1 pos"]:
        """Draw a text of `dataset` by numpy's global generator; with `tokenize` its ids.

        Loads the data set if there is none, see `load_sample_training_dataset`.
        """
        texts = self.load_sample_training_dataset() if self.dataset is None else self.dataset
        text = texts[int(np.random.randint(len(texts)))]["text"]  # noqa: NPY002
        return self.to_tokens(text, prepend_bos, padding_side) if tokenize else text

    def _stop_tokens(self, stop_at_eos: bool, eos_token_id: int | Sequence[int] | None) -> Int[Tensor, "token"]:
        ids: Any = getattr(self.tokenizer, "eos_token_id", None) if eos_token_id is None else eos_token_id
        if stop_at_eos and ids is None:
            raise ValueError("stop_at_eos needs an end-of-sequence token: give eos_token_id=, or stop_at_eos=False")
        return torch.tensor([] if not stop_at_eos else [ids] if isinstance(ids, int) else list(ids), dtype=torch.long)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(MISSING)
        return self.tokenizer


def _one_prompt(tokens: Tensor) -> Int[Tensor, "pos"]:
    tokens = tokens[0] if tokens.ndim == 2 and len(tokens) == 1 else tokens
    if tokens.ndim > 1:
        raise ValueError(f"tokens must be those of one prompt, [pos] or [1 pos], got {tuple(tokens.shape)}")
    return tokens.reshape(-1)
