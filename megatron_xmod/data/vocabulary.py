"""The number of tokens of a run, which the tokenizer may tell. No torch."""

from dataclasses import replace
from functools import lru_cache

from megatron_xmod.config.schema import Config
from megatron_xmod.data.tokenizer import load_tokenizer
from megatron_xmod.errors import UserError


@lru_cache
def _tokenizer_size(kind: str, path: str | None) -> int:
    return load_tokenizer(kind, path).vocab_size


def resolve_vocabulary(config: Config) -> Config:
    """The configuration with the true number of tokens in it.

    Raises:
        UserError: it is neither given nor told by a tokenizer, or the tokenizer has more.
    """
    if config.data.tokenizer is None:
        if config.model.vocab_size is None:
            raise UserError("model.vocab_size is null and there is no data.tokenizer to take it from. Set one of them.")
        return config
    size = _tokenizer_size(config.data.tokenizer, config.data.tokenizer_path)
    if config.model.vocab_size is None:
        return replace(config, model=replace(config.model, vocab_size=size))
    if size > config.model.vocab_size:
        raise UserError(f"the tokenizer {config.data.tokenizer_path} has {size} tokens, model.vocab_size is "
                        f"{config.model.vocab_size}. Set model.vocab_size to null to take the tokenizer's.")
    return config
