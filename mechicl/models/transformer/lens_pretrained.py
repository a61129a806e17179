"""`HookedTransformer.from_pretrained`: open language models by TransformerLens 3's names and defaults."""

from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import PreTrainedTokenizerBase

from mechicl.base.arguments import Count, checked
from mechicl.models.pretrained.loading import open_pretrained
from mechicl.models.transformer.lens_names import LensNames


class LensPretrained(LensNames):
    """A transformer that can be opened from pretrained weights."""

    @classmethod
    @checked
    def from_pretrained(
        cls,
        model_name: str | Path,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        checkpoint_label: int | None = None,
        hf_model: torch.nn.Module | None = None,
        device: str | torch.device | None = None,
        n_devices: int = 1,
        tokenizer: PreTrainedTokenizerBase | None = None,
        move_to_device: bool = True,
        fold_value_biases: bool = True,
        default_prepend_bos: bool | None = None,
        default_padding_side: Literal["left", "right"] | None = None,
        dtype: str | torch.dtype | None = "float32",
        first_n_layers: Count | None = None,
        n_ctx: Count | None = None,
        **from_pretrained_kwargs: Any,
    ) -> Self:
        """Open a pretrained language model, with TransformerLens 3's arguments, in eval mode.

        Families: GPT-2, GPT-Neo, GPT-J, GPT-NeoX (Pythia), OPT, Bloom, Falcon, Llama (and SmolLM), Mistral, Qwen 2 and
        3, Gemma 1 to 3 (text), Phi 1 to 3, OLMo 1 and 2, StableLM, and TransformerLens' own small models. Folders of
        transformers need safetensors, and are checked before memory is allocated. State dicts of torch are read as
        tensors and plain data, and nothing in them is executed.

        By default the weights are processed, which leaves the probabilities as they are (see `process_weights`): a step
        that would change them in this family is left out. Processing is computed in float64 and takes the memory of
        several copies; `from_pretrained_no_processing` takes little more than the weights.

        Args:
            model_name: name on the Hugging Face hub, TransformerLens' name for it ("gpt2-small", "pythia-160m",
                "attn-only-2l"), or a folder with config and weights, of transformers or of TransformerLens' own format.
            fold_ln: take this step of `process_weights`; `center_writing_weights`, `center_unembed`,
                `fold_value_biases` and `refactor_factored_attn_matrices` are the others.
            checkpoint_index: index of a checkpoint of the training (Pythia, Stanford's GPT-2, TransformerLens' own).
            checkpoint_value: step of that checkpoint, if there is no `checkpoint_index`.
            checkpoint_label: another name of `checkpoint_value`.
            hf_model: a model of transformers, whose weights are copied instead of loading them.
            device: device of the model; by default the CPU, or where `device_map` or `hf_model` has the weights. On
                "meta" no weights are read.
            n_devices: only 1.
            tokenizer: tokenizer of transformers; by default the one in the folder or repository, if there is one.
            move_to_device: False leaves the model where the weights were loaded.
            default_prepend_bos: put the tokenizer's first token (BOS) before texts; by default as in TransformerLens,
                False for GPT-NeoX, Bloom, Qwen and Phi and True for the others.
            default_padding_side: side on which shorter texts are padded.
            dtype: type of the weights. float32 by default, as in TransformerLens, whatever type the files have; None
                for that of the files, in which half precision stays half precision.
            first_n_layers: open only the first layers.
            n_ctx: largest number of positions; by default the model's.
            from_pretrained_kwargs: keywords for `from_pretrained` of transformers: `revision`, `token`, `cache_dir`,
                `local_files_only`, `device_map` ...; `torch_dtype` is another name of dtype.

        Raises:
            ValueError: a family or a choice of its config that is not computed here (the message names another way), a
                checkpoint that does not exist, quantized weights, or weights that do not fit the config: missing, not
                used, or of another shape; the message names them.
            OSError: no such model, or no network connection to fetch it.

        Example:
            >>> model = HookedTransformer.from_pretrained("gpt2-small")  # doctest: +SKIP
        """
        if n_devices != 1:
            raise ValueError(f"n_devices={n_devices}: the model is on one device; move parts of it with torch")
        if checkpoint_value is not None and checkpoint_label is not None:
            raise ValueError("checkpoint_label is another name of checkpoint_value: give one of them")
        model = open_pretrained(
            cls,
            str(model_name),
            hf_model=hf_model,
            checkpoint=(checkpoint_index, checkpoint_label if checkpoint_value is None else checkpoint_value),
            device=device if move_to_device else None,
            dtype=from_pretrained_kwargs.pop("torch_dtype", dtype),
            tokenizer=tokenizer,
            fields={"n_layers": first_n_layers, "n_ctx": n_ctx, "default_prepend_bos": default_prepend_bos},
            options=from_pretrained_kwargs,
        )
        if default_padding_side is not None and model.tokenizer is not None:
            model.tokenizer.padding_side = default_padding_side
        steps: dict[str, Any] = {
            "fold_ln": fold_ln, "center_writing_weights": center_writing_weights, "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
        }  # fmt: skip
        if any(steps.values()) or refactor_factored_attn_matrices:
            # None for True: the steps that leave the outputs unchanged
            steps = {name: None if wanted else False for name, wanted in steps.items()}
            model.process_weights_(**steps, refactor_factored_attn_matrices=refactor_factored_attn_matrices)
        return model

    @classmethod
    @checked
    def from_pretrained_no_processing(
        cls,
        model_name: str | Path,
        fold_ln: bool = False,
        center_writing_weights: bool = False,
        center_unembed: bool = False,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = False,
        dtype: str | torch.dtype | None = torch.float32,
        default_prepend_bos: bool | None = None,
        default_padding_side: Literal["left", "right"] | None = None,
        **from_pretrained_kwargs: Any | torch.nn.Module,
    ) -> Self:
        """Open a pretrained language model without changing its weights: its logits are those of transformers.

        Matrices are views of the loaded tensors, so that loading takes little more memory than the weights. Arguments
        are those of `from_pretrained`, with other defaults.
        """
        more: dict[str, Any] = dict(from_pretrained_kwargs)
        return cls.from_pretrained(
            model_name, fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices,
            fold_value_biases=fold_value_biases, dtype=dtype, default_prepend_bos=default_prepend_bos,
            default_padding_side=default_padding_side, **more,
        )  # fmt: skip
