"""Sampling tokens from a model of token ids."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.utilities import USE_DEFAULT_VALUE, sample_logits

from mechicl.base.progress import progress_bar
from mechicl.models.prompted import with_batch_axis
from mechicl.models.transformer.tokenizing import Tokenizing


class Generating(Tokenizing):
    """A model that can be asked for the tokens after a prompt, as in TransformerLens."""

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
        """A prompt, and the tokens that the model puts after it.

        Several texts are continued one by one, each as if it were alone. A row of tokens that has ended is filled up
        with the end-of-sequence token while others go on.

        Args:
            input: a text, several, or token ids.
            max_new_tokens: how many to generate at most; prompt and answer must fit into n_ctx.
            stop_at_eos: end a row at an end-of-sequence token.
            eos_token_id: this token, or several; by default the tokenizer's.
            do_sample: draw tokens; otherwise take the likeliest.
            top_k: draw from the k likeliest tokens only.
            top_p: draw from the fewest tokens whose probabilities sum to this.
            temperature: logits are divided by it; 0 for the likeliest token.
            freq_penalty: subtracted from a token's logit for each time that it occurred.
            repetition_penalty: divides positive logits of tokens that occurred, and multiplies negative ones.
            prepend_bos: as for `to_tokens`.
            return_type: "str", "tokens", or the kind of the input. Texts come without special tokens.
            verbose: show a progress bar.
            seed: of the draws; by default torch's global generator goes on.
            use_past_kv_cache: ignored, there is none; so that code written for TransformerLens runs.
            padding_side: likewise.

        Returns:
            The prompt and what follows: a text, a list of texts, or token ids `[batch pos_and_new]`.

        Raises:
            ValueError: an unknown return_type, no end-of-sequence token to stop at, text without a tokenizer, or more
                positions than the model has.

        Example:
            >>> cfg = TransformerConfig(prompt_format="token_ids", d_vocab=7, n_ctx=6, d_model=8, n_heads=2)
            >>> tokens = HookedTransformer(cfg).generate(torch.tensor([[1, 2]]), 3, stop_at_eos=False, seed=0)
            >>> tokens.shape
            torch.Size([1, 5])
        """
        if return_type not in ("input", "str", "tokens"):
            raise ValueError(f"return_type={return_type!r} is not one of ('input', 'str', 'tokens')")
        stops = self._stop_tokens(eos_token_id) if stop_at_eos else torch.empty(0, dtype=torch.long)
        texts = [input] if isinstance(input, str) else input
        if isinstance(texts, Tensor):
            prompts = [with_batch_axis(texts)]
        else:
            prompts = [self.to_tokens(text, prepend_bos) for text in texts]

        model, results = cast(Any, self), []
        with _seeded(seed), progress_bar(total=max_new_tokens * len(prompts), unit="token", progress=verbose) as bar:
            for tokens in prompts:
                stops, length = stops.to(tokens), tokens.shape[1]
                for _ in range(max_new_tokens):
                    logits = model(tokens, at="query")[:, -1]
                    if do_sample:
                        options: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
                        options |= {"freq_penalty": freq_penalty, "repetition_penalty": repetition_penalty}
                        new = sample_logits(logits, tokens=tokens, **options)
                    else:
                        new = logits.argmax(-1)
                    ended = torch.isin(tokens[:, length:], stops).any(1)
                    if ended.any():
                        new = torch.where(ended, stops[0], new)
                    tokens = torch.cat([tokens, new[:, None].to(tokens)], dim=1)
                    bar.update()
                    if len(stops) and torch.isin(tokens[:, length:], stops).any(1).all():
                        break
                results.append(tokens)
        as_text = return_type == "str" or (return_type == "input" and not isinstance(input, Tensor))
        if as_text:
            rows = [row for tokens in results for row in tokens]
            decoded = [cast(str, self._tokenizer().decode(row, skip_special_tokens=True)) for row in rows]
            return decoded[0] if len(decoded) == 1 else decoded
        return self._one_tensor(results)

    def _one_tensor(self, rows: list[Tensor]) -> Int[Tensor, "batch pos_and_new"]:
        """Rows of different lengths as one tensor, padded on the left as TransformerLens does."""
        longest = max(row.shape[1] for row in rows)
        if all(row.shape[1] == longest for row in rows):
            return torch.cat(rows)
        pad = cast(int, self._tokenizer().pad_token_id)
        return torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=pad) for row in rows])

    def _stop_tokens(self, eos_token_id: int | Sequence[int] | None) -> Int[Tensor, "token"]:
        if eos_token_id is None:
            if self.tokenizer is None or self.tokenizer.eos_token_id is None:
                raise ValueError(
                    "stop_at_eos needs an end-of-sequence token, and there is no tokenizer: give eos_token_id=, or "
                    "stop_at_eos=False"
                )
            eos_token_id = cast(int, self.tokenizer.eos_token_id)
        return torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id))


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """A context in which torch's global generators start from a seed, and afterwards are where they were."""
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield
